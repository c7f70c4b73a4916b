"""Generated images for segmentation: bright circles and squares on a noisy ground. Four scanners differ in brightness and noise."""

from __future__ import annotations

import numpy as np

from kilter.data.files import Arrays
from kilter.seeds import numpy_generator

SCANNERS = ("scanner-a", "scanner-b", "scanner-c", "scanner-d")
ROWS, SIZE = 240, 32


def shapes() -> Arrays:
    """Images (N, 32, 32) and masks: 0 ground, 1 circle, 2 square. Three of four images are for training."""
    rng = numpy_generator(0, "shapes")
    x = np.zeros((ROWS, SIZE, SIZE), dtype=np.float32)
    y = np.zeros((ROWS, SIZE, SIZE), dtype=np.int64)
    group = np.arange(ROWS) % len(SCANNERS)
    down, across = np.mgrid[:SIZE, :SIZE]
    for k in range(ROWS):
        level, noise = 0.1 + 0.1 * group[k], 0.03 + 0.03 * group[k]
        for kind in (1, 2):
            radius = rng.integers(4, 8)
            top, left = rng.integers(radius, SIZE - radius, 2)
            distance = (
                np.maximum(abs(down - top), abs(across - left)) if kind == 2 else np.hypot(down - top, across - left)
            )
            y[k][distance < radius] = kind
        x[k] = level + np.where(y[k] == 1, 0.5, np.where(y[k] == 2, 0.3, 0)) + rng.normal(0, noise, (SIZE, SIZE))
    test = np.arange(ROWS) % 16 >= 12
    parts = {"train": ~test, "test": test}
    arrays = {
        f"{key}_{part}": a[rows] for key, a in (("x", x), ("y", y), ("group", group)) for part, rows in parts.items()
    }
    return arrays | {"group_names": np.array(SCANNERS), "classes": np.array(["ground", "circle", "square"])}
