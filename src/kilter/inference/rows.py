"""New rows for a model: tables, arrays and images, prepared as in training. A Mistake says what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kilter.core import as_float
from kilter.data.array_checks import features
from kilter.data.array_inputs import join_inputs
from kilter.data.files import is_table, read
from kilter.data.images import ImageFile, ImageOptions, is_image, load_images
from kilter.data.own_table import parse_features
from kilter.data.preparation import code_columns
from kilter.data.schema import quoted
from kilter.data.tables import TableOptions, read_table, table_files
from kilter.errors import Mistake
from kilter.inference.model_folder import SavedModel


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows for a model. Images have names, and those that cannot be read are missing."""

    x: Tensor  # prepared; images may be bytes
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was skipped


def read_rows(model: SavedModel, path: Path, tokenizer: str = "") -> Tensor:
    """The rows of a file or folder, prepared for this model."""
    return as_float(read_new_rows(model, path, tokenizer).x)


def read_new_rows(model: SavedModel, path: Path, tokenizer: str = "") -> NewRows:
    """The same, with the names of images; they stay bytes, as there may be many."""
    path = path.expanduser()
    if not path.exists():
        raise Mistake(f"There is no '{path}': give a table, an .npz file or a folder of images.")
    if is_table(path):
        rows = NewRows(_table(model, path, tokenizer))
    elif path.is_dir() and (files := sorted(p for p in path.rglob("*") if is_image(p))):
        rows = _images(model, path, files)
    else:
        rows = NewRows(_arrays(path))
    shape = tuple(rows.x.shape[1:])
    if shape != model.shape:
        raise Mistake(f"Rows of '{path}' have the shape {shape}, and the model needs {model.shape}.")
    return rows


def _table(model: SavedModel, path: Path, tokenizer: str) -> Tensor:
    if model.preparation is None:
        raise Mistake("The model was not trained on a table of named columns: give an .npz file with x.")
    files, _ = table_files(path)
    table = read_table(files)
    schema = model.preparation.schema
    missing = [name for name in schema.names if name not in table.columns]
    if missing:
        raise Mistake(f"'{table.name}' has no column {quoted(missing)}, which the model needs: add it.")
    raw = parse_features(
        table, list(schema.names), TableOptions(tokenizer=tokenizer, categories=code_columns(model.preparation)), schema
    )
    return torch.from_numpy(model.preparation.apply(raw))


def _images(model: SavedModel, folder: Path, files: list[Path]) -> NewRows:
    shape = model.shape
    if len(shape) != 3:
        raise Mistake(f"The model needs rows of shape {shape}, not images.")
    options = ImageOptions(f"{shape[1]}x{shape[2]}", "rgb" if shape[0] == 3 else "grey")
    decoded = load_images("images", [ImageFile(p, "any") for p in files], options, ("any",))
    names = tuple(str(path.relative_to(folder)) for path in decoded.paths)
    return NewRows(torch.from_numpy(decoded.x), names, decoded.notes)


def _arrays(path: Path) -> Tensor:
    arrays, _ = join_inputs(path.stem, read(path))
    for name in ("x", "x_test"):
        if name in arrays:
            return features(path.stem, arrays[name])
    raise Mistake(f"'{path}' has no array x: save one with a row for each prediction.")
