"""Train FEDSBME on four data sets one after another, as its paper does, and test the model on all four after each.

    python examples/data_sets_in_sequence.py FOLDER [METHOD]

The data sets are parts of chest_xray.npz (its folder is in KILTER_DATA), by source: children, a mined archive, published cases and
a few small collections. Each run starts from the last one's model (`--weights`). Every step is a command that you can type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SETS = {
    "children": ("guangzhou",),
    "archive": ("nih",),
    "cases": ("hannover", "radiopaedia", "eurorad", "literature"),
    "small": ("actualmed", "figure1"),
}


def write_data(source: Path, folder: Path) -> None:
    """NAME.npz for each data set: images, labels and the names of all three classes."""
    data = np.load(source)
    sources = [str(name) for name in data["sources"]]
    for name, members in SETS.items():
        arrays = {"classes": data["classes"]}
        for part in ("train", "test"):
            mine = np.isin(data[f"source_{part}"], [sources.index(member) for member in members])
            arrays |= {f"x_{part}": data[f"x_{part}"][mine], f"y_{part}": data[f"y_{part}"][mine].astype(np.int64)}
        np.savez(folder / f"{name}.npz", **arrays)


def kilter(folder: Path, *words: str) -> str:
    print("$ kilter", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "kilter", *words], cwd=folder, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    return done.stdout


def accuracy(folder: Path, run: str, name: str) -> float:
    """Of the run's model on the test rows of a data set."""
    words = ("evaluate", run, "--data", f"{name}.npz", "--steps", "0", "--json")
    return float(json.loads(kilter(folder, *words))["received"]["accuracy"])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "in-sequence")
    method = sys.argv[2] if len(sys.argv) > 2 else "fedsbme"
    source = Path(os.environ.get("KILTER_DATA", ".")) / "chest_xray.npz"
    if not source.is_file():
        sys.exit(f"'{source}' does not exist: set KILTER_DATA to the folder of chest_xray.npz.")
    folder.mkdir(parents=True, exist_ok=True)
    write_data(source, folder)
    settings = ("--partition", "fedsbme:0.5:2", "--clients", "4", "--model", "cnn:8", "--rounds", "8", "--epochs", "2")
    lines = [f"| after training on | {' | '.join(SETS)} |", "|---" * (len(SETS) + 1) + "|"]
    weights: tuple[str, ...] = ()
    for name in SETS:
        out = f"runs/{method}-{name}"
        data = ("--data", f"{name}.npz", "--batch", "16")
        kilter(folder, "run", "--method", method, *data, *settings, *weights, "--out", out, "--quiet")
        cells = " | ".join(f"{accuracy(folder, out, other):.1%}" for other in SETS)
        lines.append(f"| {name} | {cells} |")
        weights = ("--weights", f"{out}/best.safetensors")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
