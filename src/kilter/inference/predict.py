"""Predictions as a table: the class with probabilities, labels, numbers or risks of new rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import parquet
from torch import Tensor

from kilter.errors import Mistake
from kilter.inference.model_folder import SavedModel
from kilter.tasks.kinds import CLASSIFICATION, prediction, probabilities


def predict(model: SavedModel, x: Tensor, files: Sequence[str] = ()) -> pa.Table | np.ndarray:
    """The predictions for prepared rows: a table with one line for each, or an array of classes of pixels or tokens.

    `files` are the names of the images that the rows are from.
    """
    outputs = model.outputs(x)
    kind = model.task.kind
    predicted = prediction(kind, outputs)
    if kind in ("segmentation", "next-token"):
        return predicted.numpy()
    names = model.classes
    columns: dict[str, object] = {"row": np.arange(1, len(x) + 1)} | ({"file": list(files)} if files else {})
    if kind in CLASSIFICATION:
        columns["prediction"] = pa.DictionaryArray.from_arrays(pa.array(predicted.numpy()), pa.array(names)).cast(
            pa.string()
        )
    elif kind == "multi-label":
        columns |= {name: predicted[:, k].numpy() for k, name in enumerate(names)}
    else:
        columns["risk" if kind == "survival" else names[0] if names else "prediction"] = predicted.numpy()
    p = probabilities(kind, outputs)
    if p is not None:
        columns |= {f"p({name})": p[:, k].numpy() for k, name in enumerate(names)}
    return pa.table(columns)


def save(predictions: pa.Table | np.ndarray, path: Path) -> None:
    """Write predictions as .csv, .parquet or .npz."""
    is_table = isinstance(predictions, pa.Table)
    if path.suffix not in ((".csv", ".parquet") if is_table else (".npz",)):
        wanted = ".csv or .parquet" if is_table else ".npz, because a row has many predictions"
        raise Mistake(f"--out must end in {wanted}, not '{path.name}'.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            arrow_csv.write_csv(predictions, path)
        elif path.suffix == ".parquet":
            parquet.write_table(predictions, path)
        else:
            np.savez_compressed(path, prediction=predictions)
    except OSError as e:
        raise Mistake(f"'{path}' could not be written: {e.strerror}.") from None
