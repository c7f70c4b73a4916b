"""Checks of arrays: which there are, their lengths, and what features may look like."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kilter.data.files import AnyArray, Arrays
from kilter.errors import Mistake

FLOATS = 2**30  # arrays of images of at most this many bytes are stored as float32 instead of uint8


def need(name: str, arrays: Arrays, *keys: str) -> None:
    """Check that these arrays exist and are not empty."""
    for key in keys:
        if key not in arrays:
            has = ", ".join(sorted(arrays)) or "nothing"
            raise Mistake(
                f"Data '{name}' has no array '{key}' (it has {has}): give x_train, y_train, x_test, y_test, or x, y."
            )
        if arrays[key].ndim == 0 or arrays[key].size == 0:
            raise Mistake(f"Data '{name}': array '{key}' is empty: it needs at least one row.")


def lengths(name: str, arrays: Arrays, *pairs: str, flat: bool = True) -> None:
    """Check that columns that belong together have the same length. Groups, and with `flat` also y, have one dimension."""
    for pair in pairs:
        x, other = pair.split()
        if arrays[other].shape[:1] != arrays[x].shape[:1] or (
            other[0] != "x" and arrays[other].ndim != 1 and (flat or other[0] != "y")
        ):
            raise Mistake(
                f"Data '{name}': '{x}' has {len(arrays[x])} rows and '{other}' has shape {arrays[other].shape}: "
                "give one entry for each row."
            )


def features(name: str, x: AnyArray) -> Tensor:
    """(N, F) float tables, or (N, C, H, W) images. Bytes become floats in 0..1 if the images fit in FLOATS."""
    if x.dtype.kind not in "iufb" or not 2 <= x.ndim <= 4 or x.size == 0:
        raise Mistake(
            f"Data '{name}': x has type {x.dtype} and shape {x.shape}: give numbers, (N, F), (N, H, W) or (N, H, W, C)."
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and (x.shape[3] in (1, 3) or x.shape[1] not in (1, 3)):
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.dtype == np.uint8 and x.ndim == 4:
        images = torch.from_numpy(x)
        return images.float().div_(255) if 4 * images.numel() <= FLOATS else images
    with np.errstate(over="ignore"):  # too large a number becomes infinite, which is refused
        table = torch.from_numpy(x.astype(np.float32, copy=False))
    bad = torch.cat([~part.isfinite().flatten(1).all(1) for part in table.split(65_536)])
    if bad.any():
        raise Mistake(
            f"Data '{name}': x has NaN or infinite values in {int(bad.sum())} of {len(bad)} rows, "
            f"first in row {int(bad.nonzero()[0])}: fill in or remove them."
        )
    return table
