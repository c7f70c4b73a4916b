"""Clients by the direction of their updates: cosines, the two-way split of Clustered FL, and HDBSCAN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kilter.core import Params

Linkage = Literal["complete", "single"]
Cluster = dict[str, Any]  # {"ids": names of its clients, "w": its model}


def of(clusters: Sequence[Cluster], name: str) -> Params:
    """The model of the cluster this client is in."""
    found: Params = next(c["w"] for c in clusters if name in c["ids"])
    return found


def cosines(updates: Tensor) -> Tensor:
    """(n, n) cosines between the rows of (n, d); 0 with a row of zeros."""
    unit = torch.nn.functional.normalize(updates.double(), dim=1)
    return (unit @ unit.T).clamp(-1, 1)


def bipartition(cosine: Tensor, linkage: Linkage = "complete") -> tuple[list[int], list[int], float]:
    """Positions of the two sides, the first one's first, and the largest cosine across.

    `single` linkage gives the smallest possible largest cosine across; `complete` (the authors' code) nearly so, and does not
    split off outliers one by one.
    """
    from sklearn.cluster import AgglomerativeClustering

    labels = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=linkage).fit_predict(
        1 - cosine.numpy()
    )
    left = np.flatnonzero(labels == labels[0]).tolist()
    right = np.flatnonzero(labels != labels[0]).tolist()
    return left, right, float(cosine[left][:, right].max())


def hdbscan(cosine: Tensor, size: int = 2, samples: int = 1) -> list[int]:
    """A label for each row by density of 1 - cos; -1 belongs to none."""
    from sklearn.cluster import HDBSCAN

    if len(cosine) < max(size, samples, 2):
        return [-1] * len(cosine)
    distance = (1 - cosine).clamp(min=0).fill_diagonal_(0).numpy()
    found = HDBSCAN(metric="precomputed", min_cluster_size=size, min_samples=samples, copy=True).fit_predict(distance)
    return [int(label) for label in found]
