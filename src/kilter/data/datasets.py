"""Data sets, loaded by name or path: one table of rows, and the numbers of its training and test rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.core import as_float
from kilter.data import hub
from kilter.data.files import AnyArray, Arrays, is_table, read, read_npz, write_npz
from kilter.data.holdout import hold_out
from kilter.data.preparation import load_table
from kilter.data.schema import Schema
from kilter.data.tables import SUFFIXES, TableOptions
from kilter.errors import Mistake, unknown

FLOATS = 2**30  # images of at most this many bytes are stored as float32 instead of uint8


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
    schema: Schema | None = None  # of a table: what `x` was prepared with
    own_schema: Schema | None = None  # of a table: what its own rows say, before schemas of sites are merged
    client_source: str = ""  # where the clients of a table come from: a column or files


def load(
    name: str | Path,
    cache: Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    schema: Schema | None = None,
    table: TableOptions | None = None,
) -> Dataset:
    """Load a data set by name (see DATASETS), or your own by path (.csv, .tsv, .parquet, .npz or a folder).

    Named data sets are looked up in the folder $KILTER_DATA, in the cache ($KILTER_CACHE or ~/.cache/kilter), and on the hub.
    `classes` lists the classes of your own data in order. Sites that hold only some classes must agree on the list.
    `table` says how to read a table. With `schema`, its columns are matched by name and prepared as the schema says.
    """
    text = str(name)
    if text in SOURCES:
        source = SOURCES[text]
        return assemble(text, source.prepare(source.make() if source.make else find(text, source, cache)))
    path = Path(text).expanduser()
    if is_table(path):
        return from_table(path, table or TableOptions(), schema, None if classes is None else tuple(classes))
    if path.suffix in (".npz", *SUFFIXES) or path.exists() or os.sep in text:
        arrays = read(path)
        if classes is not None:
            arrays["classes"] = np.array(list(classes))
        return assemble(path.stem, arrays)
    raise unknown("data set", text, SOURCES)


def from_table(path: Path, options: TableOptions, schema: Schema | None, classes: tuple[str, ...] | None) -> Dataset:
    """A Dataset from a table, prepared for training."""
    table = load_table(path, options, schema, classes)
    return Dataset(
        name=path.stem,
        x=torch.from_numpy(table.x),
        y=torch.from_numpy(table.y),
        train=torch.from_numpy(table.train),
        test=torch.from_numpy(table.test),
        classes=table.schema.classes if classes is None else classes,
        groups=None if table.groups is None else torch.from_numpy(table.groups),
        group_names=table.group_names,
        schema=table.schema,
        own_schema=table.own,
        client_source=table.client,
    )


# From arrays to a Dataset ---------------------------------------------------------------------------------------------


def assemble(name: str, arrays: Arrays) -> Dataset:
    """A Dataset from arrays. Every array is checked."""
    a = dict(arrays)
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
            lengths(name, a, f"x_train {key}_train", f"x_test {key}_test")
            a[key] = np.concatenate([a.pop(f"{key}_train"), a.pop(f"{key}_test")])
    else:
        need(name, a, "x", "y")
        lengths(name, a, "x y", *(["x group"] if "group" in a else []))
        first = None
    y, classes = labels(name, a["y"], a.get("classes"))
    groups, group_names = natural_groups(name, a["group"], a.get("group_names")) if "group" in a else (None, ())
    if first is None:
        train, test = hold_out(y, groups)
    else:
        train, test = np.arange(first), np.arange(first, len(y))
    x = features(name, a.pop("x"))
    mean, std = moments(x, train) if x.ndim == 4 and x.shape[1] == 3 else (None, None)
    return Dataset(
        name=name,
        x=x,
        y=torch.from_numpy(y),
        train=torch.from_numpy(train),
        test=torch.from_numpy(test),
        classes=classes,
        groups=None if groups is None else torch.from_numpy(groups),
        group_names=group_names,
        mean=mean,
        std=std,
    )


def need(name: str, arrays: Arrays, *keys: str) -> None:
    """Check that these arrays exist and are not empty."""
    for key in keys:
        if key not in arrays:
            has = ", ".join(sorted(arrays)) or "nothing"
            raise Mistake(
                f"Data '{name}' has no array '{key}' (it has {has}): give x_train, y_train, x_test, y_test, or x, y."
            )
        if arrays[key].ndim == 0 or arrays[key].size == 0:
            raise Mistake(f"Data '{name}': array '{key}' is empty: it needs at least one row.")


def lengths(name: str, arrays: Arrays, *pairs: str) -> None:
    """Check that columns that belong together have the same length, and that all except x are one-dimensional."""
    for pair in pairs:
        x, other = pair.split()
        if arrays[other].shape[:1] != arrays[x].shape[:1] or (other[0] != "x" and arrays[other].ndim != 1):
            raise Mistake(
                f"Data '{name}': '{x}' has {len(arrays[x])} rows and '{other}' has shape {arrays[other].shape}: "
                "give one entry for each row."
            )


def labels(name: str, y: AnyArray, class_names: AnyArray | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers 0..C-1 and class names. Labels that are names are numbered in the order of `class_names`, or sorted."""
    classes = None if class_names is None else tuple(str(c) for c in class_names)
    if y.dtype.kind in "US":
        words = y.astype(str)
        names = classes or tuple(np.unique(words).tolist())
        unlisted = sorted(set(words.tolist()) - set(names))
        if unlisted:
            raise Mistake(
                f"Data '{name}': label '{unlisted[0]}' is not among the classes {', '.join(names)}: "
                "correct one or the other."
            )
        number = {word: at for at, word in enumerate(names)}
        return np.array([number[word] for word in words.tolist()], dtype=np.int64), names
    if y.dtype.kind not in "iufb":
        raise Mistake(f"Data '{name}': labels are of type {y.dtype}: give class numbers 0, 1, 2, ... or names.")
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.floor(y)).all()):
        raise Mistake(
            f"Data '{name}': a label is missing or not a whole number: give class numbers 0, 1, 2, ... or names."
        )
    if (y < 0).any():
        raise Mistake(f"Data '{name}': label {int(y.min())} is negative: number the classes 0, 1, 2, ....")
    top = int(y.max())
    if classes is not None and top >= len(classes):
        raise Mistake(
            f"Data '{name}': label {top} is out of range, there are {len(classes)} classes (0..{len(classes) - 1})."
        )
    if classes is None and top >= max(1000, len(y)):
        raise Mistake(f"Data '{name}': label {top} is too large to be a class number: number the classes 0, 1, 2, ....")
    return y.astype(np.int64), classes or tuple(str(c) for c in range(top + 1))


def natural_groups(name: str, group: AnyArray, listed: AnyArray | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Group numbers and names."""
    if group.dtype.kind not in "iuUSb":
        raise Mistake(f"Data '{name}': groups are of type {group.dtype}: give whole numbers or names.")
    if listed is not None and group.dtype.kind in "iu":
        if int(group.min()) < 0 or int(group.max()) >= len(listed):
            raise Mistake(f"Data '{name}': a group number is outside 0..{len(listed) - 1}, the range of group_names.")
        return group.astype(np.int64), tuple(str(g) for g in listed)
    names, numbers = np.unique(group.astype(str) if group.dtype.kind == "S" else group, return_inverse=True)
    return numbers.astype(np.int64), tuple(str(g) for g in names.tolist())


def features(name: str, x: AnyArray) -> Tensor:
    """(N, F) float tables, or (N, C, H, W) images. Bytes become floats in 0..1 if the images fit in FLOATS."""
    if x.dtype.kind not in "iufb" or not 2 <= x.ndim <= 4 or x.size == 0:
        raise Mistake(
            f"Data '{name}': x has type {x.dtype} and shape {x.shape}: give numbers, (N, F), (N, H, W) or (N, H, W, C)."
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and (x.shape[3] in (1, 3) or x.shape[1] not in (1, 3)):
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.dtype == np.uint8 and x.ndim == 4:
        images = torch.from_numpy(x)
        return images.float().div_(255) if 4 * images.numel() <= FLOATS else images
    table = torch.from_numpy(x.astype(np.float32))
    bad = ~table.isfinite().flatten(1).all(1)
    if bad.any():
        raise Mistake(
            f"Data '{name}': x has NaN or infinite values in {int(bad.sum())} of {len(bad)} rows, "
            f"first in row {int(bad.nonzero()[0])}: fill in or remove them."
        )
    return table


def moments(x: Tensor, train: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the training rows, in 0..1."""
    total = square = torch.zeros(x.shape[1], dtype=torch.float64)
    for start in range(0, len(train), 1024):
        some = as_float(x[torch.from_numpy(train[start : start + 1024])]).flatten(2)
        total, square = total + some.sum((0, 2)).double(), square + some.square().sum((0, 2)).double()
    mean = total / (len(train) * x[0, 0].numel())
    std = (square / (len(train) * x[0, 0].numel()) - mean**2).clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


# Named data sets ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where a named data set comes from."""

    about: str
    files: tuple[str, ...] = ()  # tried in this order in each folder
    page: hub.Page | None = None
    make: Callable[[], Arrays] | None = None  # for data that comes with a library
    prepare: Callable[[Arrays], Arrays] = lambda arrays: arrays
    group: str = "group"  # arrays {group}_train, {group}_test
    group_names: str = "group_names"


def find(name: str, source: Source, cache: Path | None) -> Arrays:
    """The arrays of a named data set, from the first folder that has it, or from the hub."""
    data = os.environ.get("KILTER_DATA")
    if data and not Path(data).is_dir():
        raise Mistake(f"KILTER_DATA names '{data}', which is not a folder: set it to the folder of the .npz files.")
    store = cache or Path(os.environ.get("KILTER_CACHE") or Path.home() / ".cache" / "kilter")
    keys = {key: key for part in ("train", "test") for key in (f"x_{part}", f"y_{part}")}
    keys |= {f"{source.group}_{part}": f"group_{part}" for part in ("train", "test")}
    keys |= {source.group_names: "group_names", "classes": "classes", "features": "features"}
    for folder in [Path(data), store] if data else [store]:
        for file in source.files:
            if (folder / file).is_file():
                return {keys[key]: array for key, array in read_npz(folder / file, keys).items()}
    ways = f"put {source.files[0]} into a folder and set KILTER_DATA to that folder, or put it into the cache {store}"
    if source.page is None:
        raise Mistake(f"Data set '{name}' was not found: {ways} (it is not on the Hugging Face hub).")
    try:
        arrays = hub.fetch(source.page)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Mistake(
            f"Data set '{name}' was not found: {ways}, or go online with `pip install 'kilter[hub]'` to fetch it from "
            f"the Hugging Face hub (its error: {reason})."
        ) from error
    if "x" in arrays:
        arrays = divide(arrays)
    unnamed = {
        "group_train": f"{source.group}_train",
        "group_test": f"{source.group}_test",
        "group_names": source.group_names,
    }
    write_npz(store / source.files[0], {unnamed.get(key, key): array for key, array in arrays.items()})
    return arrays


def divide(arrays: Arrays) -> Arrays:
    """Divide x, y and group into training and test parts. A tenth of each group is for test."""
    names, groups = np.unique(arrays["group"], return_inverse=True)
    train, test = hold_out(arrays["y"].astype(np.int64), groups.astype(np.int64), every=10)
    out = {key: array for key, array in arrays.items() if key not in ("x", "y", "group")} | {"group_names": names}
    for part, rows in (("train", train), ("test", test)):
        out |= {f"x_{part}": arrays["x"][rows], f"y_{part}": arrays["y"][rows], f"group_{part}": groups[rows]}
    return out


def bundled(which: str) -> Callable[[], Arrays]:
    """A data set that comes with scikit-learn. Tables are standardised, digits scaled to 0..1."""

    def make() -> Arrays:
        from sklearn import datasets

        raw = getattr(datasets, f"load_{which}")()
        train, test = hold_out(raw.target.astype(np.int64))
        x = (raw.images / 16 if which == "digits" else raw.data).astype(np.float32)
        parts = {"x_train": x[train], "y_train": raw.target[train], "x_test": x[test], "y_test": raw.target[test]}
        parts["classes"] = np.array([str(c) for c in raw.target_names])
        return parts if which == "digits" else standardise(parts)

    return make


def standardise(arrays: Arrays) -> Arrays:
    """Subtract the training mean of each column and divide by its training standard deviation."""
    mean, std = arrays["x_train"].mean(0), arrays["x_train"].std(0)
    std = np.where(std > 0, std, 1)
    return arrays | {key: ((arrays[key] - mean) / std).astype(np.float32) for key in ("x_train", "x_test")}


def heart(arrays: Arrays) -> Arrays:
    """Replace missing values (and cholesterol 0, which means missing) by the training median, then standardise.

    Medians, means and deviations are those of all hospitals together. This is possible only in a simulation: real hospitals
    would have to compute them without sharing rows.
    """
    chol = [str(f) for f in arrays["features"]].index("chol")
    parts = {key: arrays[key].astype(np.float32, copy=True) for key in ("x_train", "x_test")}
    for x in parts.values():
        x[x[:, chol] == 0, chol] = np.nan
    median = np.nanmedian(parts["x_train"], axis=0)
    names = {"classes": np.array(["healthy", "disease"])}
    return standardise(arrays | names | {key: np.where(np.isnan(x), median, x) for key, x in parts.items()})


def named(*names: str) -> Callable[[Arrays], Arrays]:
    """Name the classes."""
    return lambda arrays: arrays | {"classes": np.array(names)}


WEAR = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "digits": Source("8x8 digits from scikit-learn, 1,797 images, 10 classes; no download", make=bundled("digits")),
        "breast-cancer": Source("30 features, 569 rows, 2 classes, from scikit-learn", make=bundled("breast_cancer")),
        "wine": Source("13 features, 178 rows, 3 classes, from scikit-learn", make=bundled("wine")),
        "mnist": Source("28x28 digits, 70,000 images, 10 classes", ("mnist.npz",), hub.Page("ylecun/mnist")),
        "fashion-mnist": Source(
            "28x28 clothes, 70,000 images, 10 classes",
            ("fashion_mnist.npz",),
            hub.Page("zalando-datasets/fashion_mnist"),
            prepare=named(*WEAR),
        ),
        "cifar10": Source(
            "32x32 colour, 60,000 images (or the 25,000 of cifar10_25k.npz), 10 classes",
            ("cifar10.npz", "cifar10_25k.npz"),
            hub.Page("uoft-cs/cifar10", image="img", mode="RGB"),
        ),
        "cifar100": Source(
            "32x32 colour, 60,000 images (or the 744 of cifar100_sample.npz), 100 classes",
            ("cifar100.npz", "cifar100_sample.npz"),
            hub.Page("uoft-cs/cifar100", image="img", label="fine_label", mode="RGB"),
        ),
        "tiny-imagenet": Source(
            "64x64 colour, 200 classes (or 32x32, 40 classes of tiny_imagenet40.npz)",
            ("tiny_imagenet.npz", "tiny_imagenet40.npz"),
            hub.Page("zh-plus/tiny-imagenet", test="valid", mode="RGB"),
        ),
        "femnist": Source(
            "28x28 characters, 62 classes, by writer",
            ("femnist.npz",),
            hub.Page("flwrlabs/femnist", label="character", test="", group="writer_id"),
            group="writer",
            group_names="writer_id",
        ),
        "chest-xray": Source(
            "64x64 radiographs, 3,636 images, 3 classes, by source (8)",
            ("chest_xray.npz",),
            group="source",
            group_names="sources",
        ),
        "heart-disease": Source(
            "13 features, 920 patients, 2 classes, by hospital (4); imputed, standardised with pooled values",
            ("heart_disease.npz",),
            prepare=heart,
            group="site",
            group_names="sites",
        ),
    }
)
DATASETS: Mapping[str, str] = MappingProxyType({name: source.about for name, source in SOURCES.items()})
