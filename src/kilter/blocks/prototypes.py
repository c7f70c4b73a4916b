"""Prototypes: the mean feature vector of each class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = -1e4  # logit of a class without a prototype


def class_means(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The classes of these rows, and the mean of z for each."""
    classes, at, counts = y.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(classes), z.shape[1]).index_add_(0, at, z)
    return classes, sums / counts[:, None]


def consensus(sets: Sequence[tuple[Tensor, Tensor]], classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the (classes, means) of clients.

    Returns the mean prototype of each class over the clients that have it (classes, d), which classes any client has
    (classes,), and all sets (clients, classes, d), in which the mean prototype fills the classes a client lacks.
    """
    means = torch.zeros(len(sets), classes, sets[0][1].shape[1])
    has = torch.zeros(len(sets), classes, dtype=torch.bool)
    for k, (own, mean) in enumerate(sets):
        means[k, own], has[k, own] = mean, True
    centre = means.sum(0) / has.sum(0).clamp(min=1)[:, None]
    return centre, has.any(0), torch.where(has[..., None], means, centre)


def similarity(z: Tensor, prototypes: Tensor, known: Tensor, tau: float) -> Tensor:
    """Logits z . prototype / tau: z (n, d), prototypes (..., classes, d), known (classes,) -> (..., n, classes)."""
    return (z @ prototypes.mT / tau).masked_fill(~known, NEVER)
