"""Data that is in memory already: data frames, arrays, and torch data sets, one for all clients or one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import torch

from kilter.data.files import AnyArray, Arrays
from kilter.data.schema import quoted
from kilter.data.table_file import INDEX, check_printable, check_type, clean
from kilter.data.tables import Table, check_dropped, join, without
from kilter.errors import Mistake


@runtime_checkable
class Frame(Protocol):
    """A data frame of pandas, polars or pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


@runtime_checkable
class MapDataset(Protocol):
    """A map-style torch Dataset whose items are (features, class number)."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int) -> tuple[object, object]: ...


ClientOf = Callable[[int], object]  # the client of an item, by its number
KINDS = (
    "a DataFrame of pandas or polars, a map-style torch Dataset, a table of arrays (x, y, ...), or a dict with one of these "
    "for each client"
)


# Data frames ----------------------------------------------------------------------------------------------------------


def as_table(data: object, drop: tuple[str, ...] = ()) -> Table | None:
    """A data frame, or a dict of data frames by client, without the columns in `drop`; None if it is something else."""
    if isinstance(data, Frame):
        return without(Table.of("the data frame", _columns("The data frame", data)), drop)
    if not isinstance(data, Mapping) or not data or not any(isinstance(frame, Frame) for frame in data.values()):
        return None
    frames = {str(client): _columns(f"The data frame of '{client}'", frame) for client, frame in data.items()}
    check_dropped("the data frames", drop, {name for columns in frames.values() for name in columns})
    frames = {client: {n: c for n, c in columns.items() if n not in drop} for client, columns in frames.items()}
    names = list(next(iter(frames.values())))
    for client, columns in frames.items():
        if "client" in columns:
            raise Mistake(
                f"The data frame of '{client}' has a column 'client' of its own: leave it out or join the frames."
            )
        missing = [name for name in names if name not in columns]
        extra = [name for name in columns if name not in names]
        if missing or extra:
            has = f"no column {quoted(missing)}" if missing else f"another column, {quoted(extra)}"
            raise Mistake(
                f"The data frame of '{client}' has {has}, unlike that of '{next(iter(frames))}': use the same."
            )
        if not names or not len(columns[names[0]]):
            raise Mistake(f"The data frame of '{client}' has no rows: add some, or leave the client out.")
    cleaned = {client: {name: clean(columns[name]) for name in names} for client, columns in frames.items()}
    for client, columns in cleaned.items():
        for name in names:
            check_type(client, name, columns[name])
    lengths = tuple(len(columns[names[0]]) for columns in cleaned.values())
    joined = {name: join([columns[name] for columns in cleaned.values()]) for name in names}
    joined["client"] = pa.chunked_array([pa.array(np.repeat(list(cleaned), lengths), pa.string())])
    return Table(joined, tuple(Path("the data frames") / client for client in cleaned), lengths, ("",) * len(lengths))


def _columns(what: str, frame: object) -> dict[str, pa.ChunkedArray]:
    """The columns of a data frame by name, without the nameless index of pandas."""
    if not isinstance(frame, Frame):
        raise Mistake(f"{what} is a {type(frame).__name__}: give {KINDS}.")
    try:
        table = pa.table(frame)
    except (pa.ArrowException, ValueError, TypeError) as error:
        reason = "; ".join(str(part) for part in error.args).splitlines()[0].rstrip(".")
        raise Mistake(f"{what} cannot be read ({reason}): give columns of numbers, words or dates.") from None
    kept = [name for name in table.column_names if not name.startswith(INDEX)]
    if len(set(kept)) < len(kept):
        twice = next(name for name in kept if kept.count(name) > 1)
        raise Mistake(f"{what} has two columns of the same name, '{twice}': rename one.")
    return {name: table.column(name) for name in check_printable(what, kept)}


# Arrays and torch data sets -------------------------------------------------------------------------------------------


def as_arrays(data: object, client: ClientOf | None) -> Arrays:
    """Arrays with the names that .npz files use, from arrays, pairs (x, y) or torch data sets."""
    if isinstance(data, MapDataset) and not isinstance(data, Mapping | str | bytes) and not _is_pair(data):
        if isinstance(data, np.ndarray | torch.Tensor | tuple):
            raise Mistake(f"A {type(data).__name__} is not data that can be loaded: give x and y, a path, or {KINDS}.")
        arrays = _stack("the torch Dataset", data)
        if client is not None:
            arrays["group"] = np.array([_client(client, at) for at in range(len(arrays["y"]))])
        return arrays
    if client is not None:
        raise Mistake("`client` tells the clients of one torch Dataset: leave it out for other data.")
    if _is_pair(data):
        return _one("the pair", data)
    if isinstance(data, Mapping) and data:
        if all(map(_is_array, data.values())) and all(isinstance(key, str) for key in data):
            return {str(key): _array(f"array '{key}'", value) for key, value in data.items()}
        if all(map(_is_part, data.values())):
            parts = {str(key): _one(f"the data of client '{key}'", part) for key, part in data.items()}
            return _join_clients(parts)
    raise Mistake(f"A {type(data).__name__} is not data that can be loaded: give a path, {KINDS}.")


def _join_clients(parts: Mapping[str, Arrays]) -> Arrays:
    """The arrays of all clients, and the client of each row."""
    shapes = {key: part["x"].shape[1:] for key, part in parts.items()}
    first, *others = shapes
    for key in others:
        if shapes[key] != shapes[first]:
            raise Mistake(
                f"Rows of client '{first}' have the shape {shapes[first]} and those of '{key}' {shapes[key]}: use one shape."
            )
    names = np.concatenate([np.repeat([key], len(part["y"])) for key, part in parts.items()])
    return {**{key: np.concatenate([part[key] for part in parts.values()]) for key in ("x", "y")}, "group": names}


def _one(what: str, data: object) -> Arrays:
    """x and y from a pair, from arrays by name or from a torch data set."""
    if isinstance(data, tuple | list) and _is_pair(data):
        arrays = {"x": _array(f"x of {what}", data[0]), "y": _array(f"y of {what}", data[1])}
    elif isinstance(data, Mapping):
        if set(data) != {"x", "y"}:
            raise Mistake(f"The arrays of {what} are {quoted(sorted(map(str, data)))}: give x and y.")
        arrays = {key: _array(f"{key} of {what}", data[key]) for key in ("x", "y")}
    else:
        assert isinstance(data, MapDataset)
        return _stack(what, data)
    if arrays["x"].shape[:1] != arrays["y"].shape[:1]:
        raise Mistake(
            f"x and y of {what} have {len(arrays['x'])} and {len(arrays['y'])} rows: give a label for each row."
        )
    return arrays


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor | list)


def _is_pair(value: object) -> bool:
    """Whether this is (x, y). A list of two lists may be a list of two items."""
    return (isinstance(value, tuple) and len(value) == 2 and all(map(_is_array, value))) or (
        isinstance(value, list) and len(value) == 2 and all(isinstance(v, np.ndarray | torch.Tensor) for v in value)
    )


def _is_part(value: object) -> bool:
    """Whether this can be the data of one client."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_array, value.values()))
    return _is_pair(value) or (
        isinstance(value, MapDataset) and not isinstance(value, str | bytes | np.ndarray | tuple)
    )


def _array(what: str, value: object) -> AnyArray:
    """An array of numpy. The channels of a tensor of images come first; they become the last, as Kilter expects of arrays."""
    if isinstance(value, torch.Tensor):
        array = _numpy(value)
        return _channels_last(array) if array.ndim == 4 else array
    try:
        return np.asarray(value)
    except ValueError:
        raise Mistake(
            f"{what[0].upper()}{what[1:]} has rows of different lengths: give the same number in each."
        ) from None


def _numpy(tensor: torch.Tensor) -> AnyArray:
    tensor = tensor.detach().cpu()
    array: AnyArray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _channels_last(array: AnyArray) -> AnyArray:
    """(..., height, width, channels) from (..., channels, height, width); images with 1 or 3 channels may be that already."""
    first, last = array.shape[-3], array.shape[-1]
    return array if last in (1, 3) and first not in (1, 3) else np.moveaxis(array, -3, -1)


def _stack(what: str, dataset: MapDataset) -> Arrays:
    """All items of a torch data set as two arrays."""
    if len(dataset) == 0:
        raise Mistake(f"{what[0].upper()}{what[1:]} is empty: it needs at least two items.")
    features: list[AnyArray] = []
    labels: list[AnyArray] = []
    for at in range(len(dataset)):
        item = dataset[at]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise Mistake(f"Item {at} of {what} is not a pair (features, class number), but a {type(item).__name__}.")
        x, y = (_numpy(part) if isinstance(part, torch.Tensor) else part for part in item)
        label = np.asarray(y)
        if label.ndim or label.dtype.kind not in "iufbU":
            raise Mistake(f"Item {at} of {what} has the label {y!r:.50}: give a class number or a name.")
        try:
            row = np.asarray(x)
        except ValueError:
            raise Mistake(f"Item {at} of {what} has features that are no array of numbers.") from None
        features.append(_channels_last(row) if isinstance(item[0], torch.Tensor) and row.ndim == 3 else row)
        labels.append(label)
    shapes = {x.shape for x in features}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise Mistake(f"Items of {what} have different shapes, such as {first} and {second}: use one shape.")
    if len({y.dtype.kind == "U" for y in labels}) > 1:
        raise Mistake(f"Labels of {what} are names and numbers: use one of them.")
    return {"x": np.stack(features), "y": np.array(labels)}


def _client(client: ClientOf, at: int) -> str:
    name = client(at)
    if name is None or name != name or not str(name).strip():
        raise Mistake(f"`client` names no client for item {at}: return a name or a number for every item.")
    return str(name)
