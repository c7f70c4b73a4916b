"""Write data sets in the raw form that a user would have: tables with gaps and words, folders of images, Parquet files, texts.

    python examples/export.py heart-disease raw/heart-disease
    kilter compare examples/heart-disease.toml

heart-disease   one CSV file for each of four hospitals, with words, gaps, a decimal comma and reordered columns
chest-xray      source/class/*.png
femnist         writer/class/*.png
breast-cancer   one Parquet file
wine            one Parquet file
notes           a CSV file of short generated texts, by clinic

The first three read the .npz files in the folder $KILTER_DATA.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

WORDS = {  # what the codes of the heart disease data mean
    "sex": {0: "female", 1: "male"},
    "cp": {1: "typical angina", 2: "atypical angina", 3: "other pain", 4: "no pain"},
    "fbs": {0: "no", 1: "yes"},
    "restecg": {0: "normal", 1: "ST-T abnormality", 2: "hypertrophy"},
    "exang": {0: "no", 1: "yes"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thal": {3: "normal", 6: "fixed defect", 7: "reversible defect"},
}


def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of a file in $KILTER_DATA."""
    folder = os.environ.get("KILTER_DATA")
    if not folder or not (Path(folder) / name).is_file():
        raise SystemExit(f"Set KILTER_DATA to a folder that has {name}.")
    with np.load(Path(folder) / name, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def heart_disease(folder: Path, most: int) -> None:
    """One file for each hospital. The second writes semicolons and decimal commas, the third has another order of columns."""
    data = arrays("heart_disease.npz")
    names = [str(name) for name in data["features"]]
    x, y, site = (np.concatenate([data[f"{key}_train"], data[f"{key}_test"]]) for key in ("x", "y", "site"))
    for at, hospital in enumerate(data["sites"]):
        order = [*names, "diagnosis"]
        if at == 2:
            order.reverse()
        separator, point = (";", ",") if at == 1 else (",", ".")
        with open(folder / f"{hospital}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=separator)
            writer.writerow(order)
            for row in np.flatnonzero(site == at)[: most or None]:
                cells = {name: heart_cell(name, float(x[row, k]), point) for k, name in enumerate(names)}
                cells["diagnosis"] = "disease" if y[row] else "healthy"
                writer.writerow([cells[name] for name in order])


def heart_cell(name: str, value: float, point: str) -> str:
    if np.isnan(value) or (name == "chol" and value == 0):  # cholesterol 0 means that it was not measured
        return "?"
    return WORDS[name].get(int(value), "?") if name in WORDS else f"{value:g}".replace(".", point)


def image_folders(folder: Path, most: int, file: str, group: str, groups: str) -> None:
    """client/class/NUMBER.png; with `most`, only the first clients and this many images of each."""
    data = arrays(file)
    x, y, client = (np.concatenate([data[f"{key}_train"], data[f"{key}_test"]]) for key in ("x", "y", group))
    clients = [str(name) for name in data[groups]]
    classes = (
        [str(name) for name in data["classes"]] if "classes" in data else [str(c) for c in range(int(y.max()) + 1)]
    )
    for at, name in enumerate(clients[:8] if most else clients):
        for row in np.flatnonzero(client == at)[: most or None]:
            path = folder / name.replace("/", "-") / classes[y[row]].replace("/", "-") / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[row]).save(path)


def bundled(folder: Path, most: int, name: str) -> None:
    """A data set of scikit-learn as one Parquet file."""
    from sklearn import datasets

    raw = getattr(datasets, f"load_{name.replace('-', '_')}")()
    columns = {str(key): raw.data[: most or None, k] for k, key in enumerate(raw.feature_names)}
    labels = [str(raw.target_names[c]) for c in raw.target[: most or None]]
    parquet.write_table(pa.table({**columns, "label": labels}), folder / f"{name}.parquet")


def notes(folder: Path, most: int) -> None:
    """Short texts: what a patient reports, at three clinics that write differently, and whether the patient was admitted."""
    rng = np.random.default_rng(0)
    severe = ["chest pain", "short of breath", "fainted", "high fever", "severe headache"]
    mild = ["runny nose", "sore throat", "mild cough", "tired", "stomach ache"]
    styles = {"north": "Patient reports {}.", "south": "Pt c/o {}.", "west": "{} since yesterday, no other complaints."}
    with open(folder / "notes.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["clinic", "age", "note", "admitted"])
        for row in range(most or 600):
            clinic = list(styles)[row % 3]
            ill = rng.random() < 0.5
            complaints = rng.choice(severe if ill else mild, 2, replace=False)
            text = styles[clinic].format(" and ".join(complaints)) + (" Seen before." if rng.random() < 0.3 else "")
            writer.writerow([clinic, int(rng.normal(60 if ill else 45, 15)), text, "yes" if ill else "no"])


EXPORTS: dict[str, Callable[[Path, int], None]] = {
    "heart-disease": heart_disease,
    "chest-xray": lambda folder, most: image_folders(folder, most, "chest_xray.npz", "source", "sources"),
    "femnist": lambda folder, most: image_folders(folder, most, "femnist.npz", "writer", "writer_id"),
    "breast-cancer": lambda folder, most: bundled(folder, most, "breast-cancer"),
    "wine": lambda folder, most: bundled(folder, most, "wine"),
    "notes": notes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPORTS)
    parser.add_argument("folder", type=Path, help="where to write; it is created")
    parser.add_argument("--most", type=int, default=0, help="write only this many rows of each client; 0: all")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    EXPORTS[arguments.name](arguments.folder, arguments.most)
    count = sum(path.is_file() for path in arguments.folder.rglob("*"))
    print(f"{count} files in {arguments.folder}")


if __name__ == "__main__":
    main()
