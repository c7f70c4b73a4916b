"""Data that is in memory already: data frames, arrays, and torch data sets, one for all clients or one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import torch

from kilter.data.files import Arrays
from kilter.data.tables import Table
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


def as_table(data: object) -> Table | None:
    """A data frame, or a dict of data frames by client, as a table; None if it is something else."""
    if isinstance(data, Frame):
        return Table.of("the data frame", dict(zip(*_columns(data), strict=True)))
    if not isinstance(data, Mapping) or not data or not all(isinstance(frame, Frame) for frame in data.values()):
        return None
    tables = []
    for client, frame in data.items():
        names, columns = _columns(frame)
        if "client" in names:
            raise Mistake(
                f"The data frame of '{client}' has a column 'client' of its own: leave it out or join the frames."
            )
        texts = pa.chunked_array([pa.array([str(client)] * len(columns[0]), pa.string())])
        tables.append(pa.table([*columns, texts], names=[*names, "client"]))
    try:
        joined = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise Mistake(f"The data frames of the clients do not fit together ({str(error).splitlines()[0]}).") from None
    return Table.of("the data frames", dict(zip(joined.column_names, joined.columns, strict=True)))


def _columns(frame: Frame) -> tuple[list[str], list[pa.ChunkedArray]]:
    table = pa.table(frame)
    kept = [name for name in table.column_names if not name.startswith("__index_level_")]  # the index of pandas
    if len(set(kept)) < len(kept):
        raise Mistake("The data frame has two columns of the same name: rename one.")
    return kept, [table.column(name) for name in kept]


def as_arrays(data: object, client: ClientOf | None) -> Arrays:
    """Arrays with the names that .npz files use, from arrays, pairs (x, y) or torch data sets."""
    if isinstance(data, Mapping) and data and all(isinstance(key, str) for key in data):
        if all(_is_array(value) for value in data.values()):
            return {str(key): _array(value) for key, value in data.items()}
        if all(isinstance(part, MapDataset) for part in data.values()):
            parts = {str(key): _stack(part) for key, part in data.items()}
            names = np.concatenate([np.repeat([key], len(part["y"])) for key, part in parts.items()])
            joined = {key: np.concatenate([part[key] for part in parts.values()]) for key in ("x", "y")}
            return {**joined, "group": names}
    if isinstance(data, tuple) and len(data) == 2 and all(map(_is_array, data)):
        return {"x": _array(data[0]), "y": _array(data[1])}
    if isinstance(data, MapDataset) and not isinstance(data, Mapping | str | bytes):
        arrays = _stack(data)
        if client is not None:
            arrays["group"] = np.array([str(client(at)) for at in range(len(arrays["y"]))])
        return arrays
    raise Mistake(f"A {type(data).__name__} is not data that can be loaded: give a path, {KINDS}.")


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor | list)


def _array(value: object) -> np.ndarray:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _stack(dataset: MapDataset) -> Arrays:
    """All items of a torch data set as two arrays."""
    if len(dataset) == 0:
        raise Mistake("The torch Dataset is empty: it needs at least two items.")
    features, labels = [], []
    for at in range(len(dataset)):
        item = dataset[at]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise Mistake(f"Item {at} of the torch Dataset is not a pair (features, class number).")
        features.append(np.asarray(item[0]))
        labels.append(int(np.asarray(item[1])))
    shapes = {x.shape for x in features}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise Mistake(f"Items of the torch Dataset have different shapes, such as {first} and {second}: use one shape.")
    return {"x": np.stack(features), "y": np.array(labels)}
