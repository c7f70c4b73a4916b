"""Data sets, loaded by name or path: one table of rows, and the numbers of its training and test rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.data.array_checks import features, lengths, need
from kilter.data.array_inputs import join_inputs
from kilter.data.array_notes import array_notes
from kilter.data.array_targets import array_targets, in_listed_order, natural_groups
from kilter.data.catalog import SOURCES, find
from kilter.data.channel_moments import moments
from kilter.data.columns import Columns, fit_kinds
from kilter.data.files import Arrays, is_table, read
from kilter.data.holdout import hold_out
from kilter.data.image_folders import find_images, is_image_folder, other_files
from kilter.data.images import SUFFIXES as PICTURES
from kilter.data.images import ImageFile, ImageOptions, load_images
from kilter.data.objects import ClientOf, as_arrays, as_table
from kilter.data.own_table import OwnTable, divide_table, image_column, listed_images, open_table
from kilter.data.preparation import PlainInput, Preparation, fit_whole
from kilter.data.saved import PREFIX, fetch_rows, is_saved, read_saved
from kilter.data.schema import Schema, check_classes
from kilter.data.statistics import summarise
from kilter.data.table_file import SUFFIXES
from kilter.data.tables import TableOptions, other_tables, without
from kilter.data.targets import TASKS, next_tokens
from kilter.errors import Mistake, unknown

SMALL = 2**26  # likewise, of a user's image files; larger sets stay in a memory-mapped file


@dataclass(frozen=True, eq=False)
class Dataset:
    """All rows of a data set; `train` and `test` are row numbers."""

    name: str
    x: Tensor  # (N, C, H, W) images in 0..1, float32 or uint8, or (N, F) tables
    y: Tensor  # int64 (N,)
    train: Tensor  # int64 row numbers
    test: Tensor  # int64 row numbers
    classes: tuple[str, ...]
    groups: Tensor | None = None  # int64 (N,): natural client (writer, source, hospital) of each row
    group_names: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None  # per channel, of the training rows, colour images only
    std: tuple[float, ...] | None = None
    sums: NDArray[np.int64] | None = None  # of large images: see kilter.data.channel_moments.channel_sums
    schema: Schema | None = None  # of a user's table
    raw: Columns | None = None  # of a user's table: its columns before preparation
    preparation: Preparation | None = None  # of a user's table: what `x` was made with; None: `x` is only a placeholder
    notes: tuple[str, ...] = ()  # what was decided or skipped while reading, for the first lines of a run
    arrays: tuple[PlainInput, ...] = ()  # the arrays x.NAME that lie side by side in a row of `x`
    skipped: tuple[str, ...] = ()  # the client of each image that could not be read; empty where the data names none
    task: str = ""  # what `y` is, where it is not a class: see kilter.data.targets
    strata: Tensor | None = None  # int64 (N,): a small class of each row, for partition rules, where `y` is none
    client_source: str = ""  # where the clients come from: a column, files or folders; empty: the data name none

    def matching(self, schema: Schema) -> Dataset:
        """The same rows of a table under a schema with the same columns and perhaps more classes."""
        assert self.schema is not None
        assert self.raw is not None
        raw = fit_kinds({name: self.raw[name] for name in self.raw}, schema)
        y = self.y
        if not schema.task and schema.classes != self.classes:
            y = torch.tensor([schema.classes.index(name) for name in self.classes])[self.y]
        return replace(self, schema=schema, classes=schema.classes, raw=raw, y=y)

    def prepared(self, preparation: Preparation) -> Dataset:
        """The same rows of a table, prepared like this."""
        assert self.raw is not None
        x = preparation.apply(self.raw)
        y = torch.from_numpy(next_tokens(x)) if self.task == "next-token" else self.y
        return replace(self, x=torch.from_numpy(x), y=y, preparation=preparation)

    @property
    def inputs(self) -> tuple[PlainInput, ...]:
        """The parts of a row by name: columns of a table, or arrays."""
        return self.preparation.inputs if self.preparation else self.arrays

    @property
    def labels(self) -> Tensor:
        """A class for each row, for partition rules."""
        return self.y if self.strata is None else self.strata

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of these classes."""
        if self.strata is None or self.task in ("segmentation", "multi-label"):
            return (*self.classes, "none") if self.task == "multi-label" else self.classes
        return tuple(str(k) for k in range(int(self.strata.max()) + 1))

    @property
    def outputs(self) -> int:
        """The number of classes, labels or tokens that a network tells apart."""
        if self.task != "next-token":
            return len(self.classes)
        return self.schema.columns[0].width if self.schema else int(self.x.max()) + 1

    @property
    def target_moments(self) -> tuple[float, float]:
        """The mean and deviation of the target over the training rows, if it is a number; else 0 and 1."""
        if self.preparation is not None:
            return self.preparation.target_moments
        if self.task not in ("regression", "survival"):
            return 0.0, 1.0
        y = self.y[self.train].double()
        numbers = y if y.ndim == 1 else y[:, 0]
        return float(numbers.mean()), float(numbers.std(correction=0)) or 1.0

    def statistics(self, rows: NDArray[np.int64], minimum: int = 1) -> dict[str, object]:
        """What a client says about its training rows: all that leaves it before the first step of a method."""
        if self.raw is not None and self.schema is not None:
            columns = summarise(self.raw, self.schema, rows, minimum)
            return {"columns": {name: column.plain() for name, column in columns.items()}}
        mean, std = moments(self.x, rows, self.sums)
        return {"count": len(rows), "mean": list(mean), "std": list(std)}


def load(
    name: str | Path | object,
    cache: Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    schema: Schema | Preparation | None = None,
    table: TableOptions | None = None,
    prepare: bool = True,
    client: ClientOf | None = None,
) -> Dataset:
    """Load a data set by name (see DATASETS), or your own: a path (.csv, .tsv, .parquet, .npz or a folder), hf:NAME, or an object.

    Objects are data frames of pandas or polars, arrays by name, pairs (x, y), and map-style torch data sets; a dict holds one of
    them for each client. `client` tells the client of an item of a torch data set from its number.

    Named data sets are looked up in the folder $KILTER_DATA, in the cache ($KILTER_CACHE or ~/.cache/kilter), and on the hub.
    `classes` lists the classes of your own data in order. Sites that hold only some classes must agree on the list.
    `table` says how to read a table or images. With `schema`, the columns of a table are matched by name. A fitted preparation
    in its place is applied as it is; otherwise it is fitted on the training rows, or, with `prepare=False`, left to whoever
    divides the rows among clients.
    """
    listed = None if classes is None else check_classes(classes)
    options = table or TableOptions()
    if not isinstance(name, str | Path):
        return from_object(name, options, schema, listed, prepare, client)
    text = str(name)
    if not text:
        raise Mistake("The name of the data is empty: give a built-in data set, a file or a folder.")
    if text in SOURCES:
        source = SOURCES[text]
        task = source.task or (table.task if table else "")
        return assemble(text, source.prepare(source.make() if source.make else find(text, source, cache)), task)
    path = Path(text).expanduser()
    if text.startswith(PREFIX) or is_saved(path):
        return _from_saved(text, path, options, schema, listed, prepare)
    if is_table(path):
        return _from_table_files(text, path, options, schema, listed, prepare)
    if is_image_folder(path):
        unused = set(options.chosen()) - {"image_size", "image_mode", "test_size"}
        _refuse(text, "images, not a table", unused | ({"schema"} if schema else set()))
        images = from_images(path.stem, find_images(path), options, listed)
        return replace(images, notes=(*images.notes, *other_files(path)))
    if path.is_dir() and any(file.suffix.lower() in PICTURES for file in path.iterdir()):
        raise Mistake(f"'{text}' holds images that are in no folder of a class: put them into class/ or client/class/.")
    if path.suffix.lower() in (".npz", *SUFFIXES) or path.exists() or os.sep in text:
        unused = set(options.chosen()) | ({"schema"} if schema else set())
        _refuse(text, "arrays, not a table", unused if path.exists() else set())
        return own_arrays(path.stem, in_listed_order(path.stem, read(path), listed), options.task)
    raise unknown("data set", text, SOURCES)


def _from_saved(
    text: str,
    path: Path,
    options: TableOptions,
    schema: Schema | Preparation | None,
    classes: tuple[str, ...] | None,
    prepare: bool,
) -> Dataset:
    rows, whole = fetch_rows(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else read_saved(path)
    _refuse(text, "a saved data set, not files", {"test_file", "image_size", "image_mode"} & set(options.chosen()))
    if len(whole) > len(rows) and options.test_size:
        raise Mistake(f"'{text}' has test rows of its own: leave out --test-size.")
    rows, whole = without(rows, options.drop), without(whole, options.drop)
    own = divide_table(rows, whole, options, structure(schema), classes)
    return from_table(path.stem, own, schema if isinstance(schema, Preparation) else None, prepare)


def _from_table_files(
    text: str,
    path: Path,
    options: TableOptions,
    schema: Schema | Preparation | None,
    classes: tuple[str, ...] | None,
    prepare: bool,
) -> Dataset:
    rows, whole = open_table(path, options)
    if column := image_column(rows):
        return from_images(path.stem, listed_images(rows, whole, column, options), options, classes)
    _refuse(text, "numbers and words, not images", {"image_size", "image_mode"} & set(options.chosen()))
    if is_image_folder(path):
        raise Mistake(f"'{text}' holds tables, and images in folders: keep one kind, or give the path of the table.")
    own = divide_table(rows, whole, options, structure(schema), classes)
    own = replace(own, notes=(*own.notes, *other_tables(path)))
    return from_table(path.stem, own, schema if isinstance(schema, Preparation) else None, prepare)


def _refuse(source: str, what: str, options: set[str]) -> None:
    """Refuse options that would have no effect on such data."""
    if options:
        name = source if source == "The object" else f"'{source}'"
        raise Mistake(f"{name} holds {what}: leave out {', '.join(sorted(options))}.")


def structure(schema: Schema | Preparation | None) -> Schema | None:
    """The schema of a schema or of a preparation."""
    return schema.schema if isinstance(schema, Preparation) else schema


def from_object(
    data: object,
    options: TableOptions,
    schema: Schema | Preparation | None,
    classes: tuple[str, ...] | None,
    prepare: bool,
    client: ClientOf | None,
) -> Dataset:
    """A Dataset from something in memory."""
    table = as_table(data, options.drop)
    chosen = set(options.chosen())
    if table is None:
        arrays = as_arrays(data, client)
        _refuse("The object", "arrays, not a table", chosen | ({"schema"} if schema else set()))
        return own_arrays("arrays", in_listed_order("arrays", arrays, classes), options.task)
    if client is not None:
        raise Mistake("`client` is for torch Datasets: name the column of the clients with TableOptions(client=...).")
    _refuse("The object", "a table in memory", {"test_file", "image_size", "image_mode"} & chosen)
    options = replace(options, client=options.client or ("client" if isinstance(data, Mapping) else ""))
    own = divide_table(table, table, options, structure(schema), classes)
    return from_table("frame", own, schema if isinstance(schema, Preparation) else None, prepare)


def from_table(name: str, table: OwnTable, preparation: Preparation | None, prepare: bool) -> Dataset:
    """A Dataset from a table."""
    whole = Dataset(
        name=name,
        x=torch.zeros(1).expand(len(table.y), len(table.schema.columns)),  # takes no memory
        y=torch.from_numpy(table.y),
        train=torch.from_numpy(table.train),
        test=torch.from_numpy(table.test),
        classes=table.schema.classes,
        groups=None if table.groups is None else torch.from_numpy(table.groups),
        group_names=table.group_names,
        schema=table.schema,
        task=table.schema.task,
        strata=None if table.strata is None else torch.from_numpy(table.strata),
        raw=table.raw,
        client_source=table.client,
        notes=table.notes,
    )
    if preparation is None and prepare:
        preparation = fit_whole(table.raw, table.schema, table.train)
    return whole if preparation is None else whole.prepared(preparation)


def from_images(name: str, files: list[ImageFile], options: TableOptions, classes: tuple[str, ...] | None) -> Dataset:
    """A Dataset from images: in memory if they are small, else memory-mapped."""
    decoded = load_images(name, files, ImageOptions(options.image_size, options.image_mode, options.test_size), classes)
    x = torch.from_numpy(decoded.x)
    if x.dtype == torch.uint8 and 4 * x.numel() <= SMALL:
        x = x.float().div_(255)
    mean, std = moments(x, decoded.train, decoded.sums) if x.shape[1] == 3 else (None, None)
    return Dataset(
        name=name,
        x=x,
        y=torch.from_numpy(decoded.y),
        train=torch.from_numpy(decoded.train),
        test=torch.from_numpy(decoded.test),
        classes=decoded.classes,
        groups=None if decoded.groups is None else torch.from_numpy(decoded.groups),
        group_names=decoded.group_names,
        mean=mean,
        std=std,
        client_source="folders" if decoded.groups is not None else "",
        notes=decoded.notes,
        skipped=decoded.skipped,
        sums=decoded.sums,
    )


# From arrays to a Dataset ---------------------------------------------------------------------------------------------


def own_arrays(name: str, arrays: Arrays, task: str) -> Dataset:
    """A Dataset from a user's arrays."""
    dataset = assemble(name, arrays, task)
    labels = arrays.get("y", arrays.get("y_train"))
    numbered = task == "" and "classes" not in arrays and labels is not None and labels.dtype.kind in "iufb"
    notes = array_notes(dataset.x, dataset.y, len(dataset.classes) if numbered and not dataset.arrays else 0, task)
    return replace(dataset, notes=(*dataset.notes, *notes))


def assemble(name: str, arrays: Arrays, task: str = "") -> Dataset:
    """A Dataset from arrays. Every array is checked. `task` says what y is, where it is not a class."""
    a, inputs = join_inputs(name, dict(arrays))
    if task == "next-token":
        for part in [key for key in a if key[0] == "x"]:
            a["y" + part[1:]] = np.zeros(len(a[part]), dtype=np.int64)
    flat = task not in ("survival", "multi-label", "segmentation")  # one number for each row
    if "x_train" in a or "y_train" in a:
        need(name, a, "x_train", "y_train", "x_test", "y_test")
        if a["x_train"].shape[1:] != a["x_test"].shape[1:]:
            raise Mistake(
                f"Data '{name}': rows of x_train have shape {a['x_train'].shape[1:]} and those of x_test "
                f"{a['x_test'].shape[1:]}: use the same features in both."
            )
        if a["x_train"].dtype != a["x_test"].dtype:
            raise Mistake(
                f"Data '{name}': x_train is {a['x_train'].dtype} and x_test {a['x_test'].dtype}: use one type for both."
            )
        if ("group_train" in a) != ("group_test" in a):
            raise Mistake(f"Data '{name}' has only one of group_train and group_test: give both or neither.")
        first = len(a["x_train"])
        keys = [key for key in ("y", "group", "x") if f"{key}_train" in a]
        for key in keys:
            lengths(name, a, f"x_train {key}_train", f"x_test {key}_test", flat=flat)
            a[key] = np.concatenate([a.pop(f"{key}_train"), a.pop(f"{key}_test")])
    else:
        need(name, a, "x", "y")
        lengths(name, a, "x y", *(["x group"] if "group" in a else []), flat=flat)
        first = None
    x = features(name, a.pop("x"))
    targets = array_targets(name, a["y"], a.get("classes"), task, x)
    groups, group_names = natural_groups(name, a["group"], a.get("group_names")) if "group" in a else (None, ())
    if first is None:
        train, test = hold_out(targets.strata, groups)
    else:
        train, test = np.arange(first), np.arange(first, len(x))
    mean, std = moments(x, train) if x.ndim == 4 and x.shape[1] == 3 else (None, None)
    return Dataset(
        name=name,
        x=x,
        y=torch.from_numpy(targets.y),
        train=torch.from_numpy(train),
        test=torch.from_numpy(test),
        classes=targets.classes,
        groups=None if groups is None else torch.from_numpy(groups),
        group_names=group_names,
        mean=mean,
        std=std,
        task=task,
        strata=torch.from_numpy(targets.strata) if task in (*TASKS, "segmentation") else None,
        arrays=inputs,
    )
