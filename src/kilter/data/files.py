"""Read arrays from a user's files: .npz (never pickled), .csv, or a folder of these."""

from __future__ import annotations

import csv
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kilter.errors import Mistake

AnyArray = NDArray[Any]
Arrays = dict[str, AnyArray]  # "x_train", "y_train", "x_test", "y_test" or "x", "y"; "group..."; "classes"
LABEL, GROUP = ("label", "y"), "group"  # columns of a csv


def read(path: Path) -> Arrays:
    """Read the arrays of a file or folder."""
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise Mistake(f"There is no file '{path}': give the path of a .npz or .csv file, or of a folder with one.")
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == ".csv":
        return read_csv(path)
    raise Mistake(f"'{path}' is neither .npz nor .csv: save the data in one of these.")


def read_folder(folder: Path) -> Arrays:
    """Read data.npz, data.csv, or train and test files of either kind."""
    for name in ("data.npz", "data.csv"):
        if (folder / name).is_file():
            return read(folder / name)
    for suffix in (".npz", ".csv"):
        if (folder / f"train{suffix}").is_file() and (folder / f"test{suffix}").is_file():
            train, test = read(folder / f"train{suffix}"), read(folder / f"test{suffix}")
            parts = {f"{key}_train": train[key] for key in ("x", "y", GROUP) if key in train}
            return (
                parts
                | {f"{key}_test": test[key] for key in ("x", "y", GROUP) if key in test}
                | {key: train[key] for key in ("classes", "group_names") if key in train}
            )
    raise Mistake(f"Folder '{folder}' has no data.npz, data.csv, or train and test files: put one of these there.")


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


def read_csv(path: Path) -> Arrays:
    """Read a table with a header, a column `label` or `y`, and optionally `group`. Every other column must be numeric."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *lines = [line for line in csv.reader(file) if line] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Mistake(f"'{path}' cannot be read as a csv file ({error}): save it as UTF-8 text with commas.") from None
    header = [name.strip() for name in header]
    label = next((name for name in LABEL if name in header), None)
    if label is None:
        raise Mistake(f"'{path}' has no column 'label' or 'y' in its first line: rename the column of the classes.")
    if len(set(header)) < len(header):
        raise Mistake(f"'{path}' has two columns of the same name in its first line: rename one.")
    features = [name for name in header if name not in (label, GROUP)]
    if not lines or not features:
        raise Mistake(
            f"'{path}' has {len(lines)} rows and {len(features)} feature columns: it needs at least one of each."
        )
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise Mistake(
                f"'{path}', row {number}, has {len(line)} cells and the first line has {len(header)}: correct that row."
            )
    columns = {name: [line[at].strip() for line in lines] for at, name in enumerate(header)}
    arrays: Arrays = {
        "x": np.stack([numbers(columns[name], name, path) for name in features], axis=1),
        "y": plain(columns[label]),
    }
    return arrays | ({GROUP: np.array(columns[GROUP])} if GROUP in header else {})


def numbers(cells: list[str], column: str, path: Path) -> NDArray[np.float32]:
    """A column of numbers; an empty cell is NaN."""
    out = np.empty(len(cells), dtype=np.float32)
    for row, cell in enumerate(cells):
        try:
            out[row] = float(cell) if cell else np.nan
        except ValueError:
            raise Mistake(
                f"'{path}', row {row + 2}, column '{column}', holds '{cell}', which is not a number: "
                "convert it to numbers first, or remove the column."
            ) from None
    return out


def plain(cells: list[str]) -> AnyArray:
    """Labels as integers or floats if every cell is one, else as names."""
    for kind in (int, float):
        try:
            return np.array([kind(cell) for cell in cells])
        except (ValueError, OverflowError):
            continue
    return np.array(cells)
