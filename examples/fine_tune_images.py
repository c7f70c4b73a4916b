"""Fine-tune an image model at four clinics that have few images each.

    python examples/fine_tune_images.py FOLDER

The script pre-trains a convolutional network on one clinic's images (digits of scikit-learn), saves its weights, and loads them
with `--weights` in a run of four other clinics, whose scanner is darker, blurred and noisy. It compares training from scratch,
fine-tuning the whole network, and fine-tuning with a personal head (`--personal`). Every run is a command that you can type.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CLINICS, ROWS = 4, 30  # training images of each clinic


def write_data(folder: Path) -> None:
    """source.npz: 1,000 images of one clinic. target.npz: few images of four clinics with another scanner."""
    digits, rng = load_digits(), np.random.default_rng(0)
    x, y = (digits.images / 16).astype(np.float32), digits.target
    order = rng.permutation(len(y))
    source, target = order[:1000], order[1000:]
    np.savez(folder / "source.npz", x=x[source], y=y[source])
    other = 0.6 * (x[target] + np.roll(x[target], 1, axis=2)) / 2 + rng.normal(0, 0.05, x[target].shape)
    train = CLINICS * ROWS
    arrays = {"x_train": other[:train], "y_train": y[target[:train]], "group_train": np.arange(train) % CLINICS}
    arrays |= {"x_test": other[train:], "y_test": y[target[train:]]}
    arrays["group_test"] = np.arange(len(arrays["y_test"])) % CLINICS
    np.savez(folder / "target.npz", **{k: v.astype(np.float32) if k[0] == "x" else v for k, v in arrays.items()})


def kilter(folder: Path, *words: str) -> None:
    print("$ kilter", *words, flush=True)
    subprocess.run([sys.executable, "-m", "kilter", *words, "--quiet"], cwd=folder, check=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "fine-tuning-images")
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    model = ("--model", "cnn", "--lr", "0.1", "--batch", "10")
    kilter(folder, "run", "--method", "pooled", "--data", "source.npz", *model, "--rounds", "6", "--out", "runs/source")
    weights = ("--weights", "runs/source/best.safetensors")
    runs = {
        "from scratch": (),
        "pre-trained": weights,
        "pre-trained, personal head": (*weights, "--personal", "head.*"),
    }
    lines = ["| training | mean accuracy of the clinics | worst clinic |", "|---|---|---|"]
    for k, (name, options) in enumerate(runs.items()):
        out = f"runs/{k}"
        kilter(folder, "run", "--data", "target.npz", *model, "--rounds", "8", *options, "--out", out)
        accuracy = json.loads((folder / out / "summary.json").read_text())["client_accuracy"]
        lines.append(f"| {name} | {accuracy['mean']:.1%} | {accuracy['min']:.1%} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
