"""The data sets that can be loaded by name: where each comes from, and how it is prepared."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kilter.data import hub
from kilter.data.files import Arrays, read_npz, write_npz
from kilter.data.holdout import hold_out
from kilter.data.shapes import shapes
from kilter.data.targets import BINS, bins
from kilter.errors import Mistake


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
    task: str = ""  # what the label is, where it is not a class
    names_clients: bool = False


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
        numbers = which == "diabetes"
        train, test = hold_out(bins(raw.target, BINS) if numbers else raw.target.astype(np.int64))
        x = (raw.images / 16 if which == "digits" else raw.data).astype(np.float32)
        parts = {"x_train": x[train], "y_train": raw.target[train], "x_test": x[test], "y_test": raw.target[test]}
        if not numbers:
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


def normal_or_not(arrays: Arrays) -> Arrays:
    """Chest radiographs with two classes instead of three, and 32x32 means of 2x2 pixels."""
    parts = {"classes": np.array(["normal", "disease"])}
    for part in ("train", "test"):
        x = arrays[f"x_{part}"]
        n, height, width = x.shape
        small = x.reshape(n, height // 2, 2, width // 2, 2).astype(np.float32).mean((2, 4)).round().astype(x.dtype)
        parts |= {f"x_{part}": small, f"y_{part}": (arrays[f"y_{part}"] > 0).astype(arrays[f"y_{part}"].dtype)}
    return arrays | parts


def named(*names: str) -> Callable[[Arrays], Arrays]:
    """Name the classes."""
    return lambda arrays: arrays | {"classes": np.array(names)}


WEAR = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "digits": Source("8x8 digits from scikit-learn, 1,797 images, 10 classes; no download", make=bundled("digits")),
        "breast-cancer": Source("30 features, 569 rows, 2 classes, from scikit-learn", make=bundled("breast_cancer")),
        "wine": Source("13 features, 178 rows, 3 classes, from scikit-learn", make=bundled("wine")),
        "diabetes": Source(
            "10 features, 442 rows, a number (regression), from scikit-learn",
            make=bundled("diabetes"),
            task="regression",
        ),
        "shapes": Source(
            "32x32 generated circles and squares, 240 images with masks (segmentation), by scanner (4)",
            make=shapes,
            task="segmentation",
            names_clients=True,
        ),
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
            names_clients=True,
        ),
        "chest-xray": Source(
            "64x64 radiographs, 3,636 images, 3 classes, by source (8)",
            ("chest_xray.npz",),
            group="source",
            group_names="sources",
            names_clients=True,
        ),
        "chest-xray-binary": Source(
            "32x32 radiographs, 3,636 images, normal or not, by source (8)",
            ("chest_xray.npz",),
            prepare=normal_or_not,
            group="source",
            group_names="sources",
            names_clients=True,
        ),
        "heart-disease": Source(
            "13 features, 920 patients, 2 classes, by hospital (4); imputed, standardised with pooled values",
            ("heart_disease.npz",),
            prepare=heart,
            group="site",
            group_names="sites",
            names_clients=True,
        ),
    }
)
DATASETS: Mapping[str, str] = MappingProxyType({name: source.about for name, source in SOURCES.items()})
GROUPED = frozenset(name for name, source in SOURCES.items() if source.names_clients)
