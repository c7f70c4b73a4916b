"""Clusters of clients by the direction of their updates: cosines, the bipartition of Clustered FL, and HDBSCAN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from kilter.core import Params

Linkage = Literal["complete", "single"]


class Cluster(TypedDict):
    """A cluster of clients and their model."""

    ids: list[str]
    w: Params


def model_of(clusters: Sequence[Cluster], name: str) -> Params:
    """The model of this client's cluster."""
    return next(c["w"] for c in clusters if name in c["ids"])


def cosines(updates: Tensor) -> Tensor:
    """Cosines (n, n) between the rows of (n, d); 0 for a row of zeros."""
    unit = torch.nn.functional.normalize(updates.double(), dim=1)
    return (unit @ unit.T).clamp(-1, 1)


def bipartition(cosine: Tensor, linkage: Linkage = "complete") -> tuple[list[int], list[int], float]:
    """Split rows into two sides. Returns their positions (the side with row 0 first) and the largest cosine between sides.

    `single` linkage minimises that cosine. `complete` linkage (the authors' code) comes close and does not split off single
    outliers.
    """
    from sklearn.cluster import AgglomerativeClustering

    labels = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=linkage).fit_predict(
        1 - cosine.numpy()
    )
    left = np.flatnonzero(labels == labels[0]).tolist()
    right = np.flatnonzero(labels != labels[0]).tolist()
    return left, right, float(cosine[left][:, right].max())


def hdbscan(cosine: Tensor, size: int = 2, samples: int = 1) -> list[int]:
    """A cluster label for each row, by HDBSCAN on the distances 1 - cos; -1: in no cluster."""
    from sklearn.cluster import HDBSCAN

    if len(cosine) < max(size, samples, 2):
        return [-1] * len(cosine)
    distance = (1 - cosine).clamp(min=0).fill_diagonal_(0).numpy()
    labels = HDBSCAN(metric="precomputed", min_cluster_size=size, min_samples=samples, copy=True).fit_predict(distance)
    return [int(label) for label in labels]
