"""A common scale for the features of tables, from the sums that each node sends: mean and deviation over all nodes' rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kilter.core import Params, Rows

FeatureSums = dict[str, Tensor]  # "sums" and "squares" of each feature, float64


def moments_of(x: Tensor) -> FeatureSums:
    """The sums of each feature and of its squares, over the rows x."""
    flat = x.flatten(1).double()
    return {"sums": flat.sum(0), "squares": flat.square().sum(0)}


def pooled_scale(parts: Sequence[tuple[FeatureSums, int]]) -> Params:
    """Mean and standard deviation of each feature over the rows of all nodes; a constant feature has deviation one.

    >>> parts = [(moments_of(torch.tensor([[1.0], [3.0]])), 2), (moments_of(torch.tensor([[5.0]])), 1)]
    >>> {k: round(float(v), 4) for k, v in pooled_scale(parts).items()}
    {'mean': 3.0, 'std': 1.633}
    """
    n = sum(rows for _, rows in parts)
    mean = torch.stack([m["sums"] for m, _ in parts]).sum(0) / n
    variance = (torch.stack([m["squares"] for m, _ in parts]).sum(0) / n - mean.square()).clamp(min=0)
    std = torch.where(variance > 1e-12 * (1 + mean.square()), variance.sqrt(), torch.ones_like(variance))
    return {"mean": mean.float(), "std": std.float()}


def standardised(rows: Rows, scale: Params) -> Rows:
    """The same rows with their features on this scale."""
    if not len(rows):
        return rows
    x = rows["x"]
    return rows.extend(x=((x.flatten(1) - scale["mean"]) / scale["std"]).reshape(x.shape))
