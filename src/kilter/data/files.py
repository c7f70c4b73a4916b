"""Read arrays from a user's .npz files, or a folder of them. Pickles are never read."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kilter.data.table_file import SUFFIXES
from kilter.errors import Mistake

AnyArray = NDArray[Any]
Arrays = dict[str, AnyArray]  # "x_train", "y_train", "x_test", "y_test" or "x", "y"; "group..."; "classes"
GROUP = "group"
ADVICE = {
    **dict.fromkeys((".zip", ".gz", ".bz2", ".xz", ".zst", ".tar", ".tgz", ".7z"), "unpack it first"),
    **dict.fromkeys((".xls", ".xlsx", ".xlsm", ".ods"), "save the sheet as a CSV file"),
    ".npy": "put the features into x.npy and the labels into y.npy, and give the path of their folder",
    ".txt": "name it .csv if it is a table",
    ".json": "save the data as a .csv or .parquet file",
    ".feather": "save the data as a .parquet file",
}


def is_table(path: Path) -> bool:
    """Whether this is a table, or a folder of tables, and not of arrays."""
    if path.is_dir():
        arrays = any((path / name).is_file() for name in ("data.npz", "train.npz"))
        return not arrays and any(file.suffix.lower() in SUFFIXES for file in path.iterdir())
    return path.is_file() and path.suffix.lower() in SUFFIXES


def read(path: Path) -> Arrays:
    """Read the arrays of a file or folder."""
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise Mistake(
            f"There is no file '{path}': give the path of a .csv, .tsv, .parquet or .npz file, or of a folder with some."
        )
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    if path.suffix.lower() in ADVICE:
        raise Mistake(f"'{path}' cannot be read as it is: {ADVICE[path.suffix.lower()]}.")
    raise Mistake(f"'{path}' is neither .npz nor .csv, .tsv or .parquet: save the data in one of these.")


def read_folder(folder: Path) -> Arrays:
    """Read data.npz, or train.npz and test.npz, or one .npy file for each array: x.npy and y.npy, or x_train.npy, ....

    Arrays in .npy files are memory-mapped: they may be larger than memory.
    """
    if (folder / "data.npz").is_file():
        return read(folder / "data.npz")
    if (folder / "x.npy").is_file() or (folder / "x_train.npy").is_file():
        return {path.stem: read_npy(path) for path in sorted(folder.glob("*.npy"))}
    if not (folder / "train.npz").is_file() or not (folder / "test.npz").is_file():
        raise Mistake(
            f"Folder '{folder}' has no data.npz, no x.npy and y.npy, no train.npz and test.npz, no images in folders, and no "
            "tables (.csv, .tsv, .parquet): "
            "put some of these there."
        )
    train, test = read(folder / "train.npz"), read(folder / "test.npz")
    return (
        {f"{key}_train": train[key] for key in ("x", "y", GROUP) if key in train}
        | {f"{key}_test": test[key] for key in ("x", "y", GROUP) if key in test}
        | {key: train[key] for key in ("classes", "group_names") if key in train}
    )


def read_npy(path: Path) -> AnyArray:
    """Map a .npy file into memory. Nobody writes to the file."""
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise Mistake(
            f"'{path}' cannot be read as an array of numbers or text ({error}): save it with np.save."
        ) from None


def read_npz(path: Path, keys: Iterable[str] | None = None) -> Arrays:
    """Read the arrays of a .npz file: all of them, or those of `keys` that exist."""
    try:
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("it is not an archive of arrays")
        with np.load(path, allow_pickle=False) as file:
            names = file.files if keys is None else [key for key in keys if key in file.files]
            return {key: file[key] for key in names}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise Mistake(
                f"'{path}' holds pickled objects, which could run code and are never read: "
                "save plain arrays of numbers or text (no dtype=object)."
            ) from None
        raise Mistake(
            f"'{path}' cannot be read, it is damaged or not a .npz file ({error}): save it again with np.savez."
        ) from None


def write_npz(path: Path, arrays: Arrays) -> None:
    """Save atomically: the file is complete or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            np.savez_compressed(file, allow_pickle=False, **arrays)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
