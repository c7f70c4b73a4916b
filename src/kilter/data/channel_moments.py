"""The mean and standard deviation of each channel of images."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.core import as_float
from kilter.data.mapped import release

LARGE = 2**14  # numbers in an image from which on its statistics are counted as bytes
Moments = tuple[tuple[float, ...], tuple[float, ...]]


def moments(x: Tensor, train: NDArray[np.int64], sums: NDArray[np.int64] | None = None) -> Moments:
    """Mean and standard deviation of each channel over the training rows, in 0..1. `sums` are those of `channel_sums`."""
    if sums is not None:
        return sum_moments(sums[train], x[0, 0].numel())
    total = square = torch.zeros(x.shape[1], dtype=torch.float64)
    if x.dtype == torch.uint8 and x[0].numel() > LARGE:
        return byte_moments(x, train)
    for start in range(0, len(train), 1024):
        some = as_float(x[torch.from_numpy(train[start : start + 1024])]).flatten(2)
        total, square = total + some.sum((0, 2)).double(), square + some.square().sum((0, 2)).double()
    mean = total / (len(train) * x[0, 0].numel())
    std = (square / (len(train) * x[0, 0].numel()) - mean**2).clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def byte_moments(x: Tensor, train: NDArray[np.int64]) -> Moments:
    """The same as `moments`, for large images: from how often each byte occurs in each channel."""
    counts = np.zeros((x.shape[1], 256))
    for start in range(0, len(train), 64):
        part = x[torch.from_numpy(train[start : start + 64])].transpose(0, 1).flatten(1).numpy()
        release(x)
        counts += np.stack([np.bincount(channel, minlength=256) for channel in part])
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(1)
    std = np.sqrt(np.maximum(counts @ values**2 / counts.sum(1) - mean**2, 1e-12))
    return tuple(mean.tolist()), tuple(std.tolist())


def channel_sums(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(channels, 2): the sum and the sum of squares of each channel of one image, exactly."""
    flat = pixels.reshape(len(pixels), -1)
    return np.stack([flat.sum(1, dtype=np.int64), np.square(flat, dtype=np.uint16).sum(1, dtype=np.int64)], axis=1)


def sum_moments(sums: NDArray[np.int64], pixels: int) -> Moments:
    """The same as `moments`, from the `channel_sums` of each image; `pixels` are those of one channel."""
    total = sums.sum(0) / (len(sums) * pixels)  # (channels, 2)
    mean = total[:, 0] / 255
    std = np.sqrt(np.maximum(total[:, 1] / 255**2 - mean**2, 1e-12))
    return tuple(mean.tolist()), tuple(std.tolist())
