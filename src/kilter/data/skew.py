"""How much the data of clients differ: in labels, in amount, in features.

Measures are computed on the rows for training and validation. Notation: n_kc rows of class c at client k, n_k their sum,
q_k = n_kc / n_k, p = the pooled label distribution. Logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kilter.core import as_float
from kilter.data.split import Split

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClientSkew:
    """The label skew of one client."""

    id: str
    n: int  # rows
    classes: int  # classes present
    entropy: float  # -sum q ln q, in nats
    kl: float  # KL(q_k || p)
    js: float  # Jensen-Shannon divergence of q_k and p, at most ln 2


@dataclass(frozen=True)
class Skew:
    """The skew of a split."""

    clients: tuple[ClientSkew, ...]
    kl: float  # mean over clients
    kl_weighted: float  # sum_k n_k KL_k / n: the mutual information of client and label
    js: float
    js_weighted: float
    classes: float  # mean number of classes of a client
    gini: float  # of the n_k
    variation: float  # std / mean of the n_k
    smallest: int
    largest: int
    feature: float | None  # see feature_skew; None if it cannot be measured

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each overall measure, as text."""
        return [
            ("label KL to the pool, mean (weighted)", f"{self.kl:.3f} ({self.kl_weighted:.3f})"),
            ("label JS to the pool, mean (weighted)", f"{self.js:.3f} ({self.js_weighted:.3f})"),
            ("classes of a client, mean", f"{self.classes:.1f}"),
            ("rows of a client, smallest to largest", f"{self.smallest:,} to {self.largest:,}"),
            ("amounts: Gini, coefficient of variation", f"{self.gini:.3f}, {self.variation:.3f}"),
            ("features within a class, in standard deviations", "-" if self.feature is None else f"{self.feature:.3f}"),
        ]


def entropy(p: ArrayLike) -> float:
    """-sum p ln p.

    >>> round(entropy([0.5, 0.5]), 6)
    0.693147
    """
    p = np.asarray(p, dtype=float)
    some = p[p > 0]
    return float(-(some * np.log(some)).sum()) + 0.0


def kl(p: ArrayLike, q: ArrayLike) -> float:
    """KL(p || q) = sum p ln(p / q); infinite if p has mass where q has none.

    >>> round(kl([1, 0], [0.5, 0.5]), 6)
    0.693147
    """
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    at = p > 0
    if (q[at] == 0).any():
        return float("inf")
    return max(0.0, float((p[at] * np.log(p[at] / q[at])).sum()))


def js(p: ArrayLike, q: ArrayLike) -> float:
    """Jensen-Shannon divergence (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2


def gini(sizes: ArrayLike) -> float:
    """sum_ij |n_i - n_j| / (2 K sum n): 0 if all are equal, (K - 1) / K if one client has all rows."""
    n = np.sort(np.asarray(sizes, dtype=float))
    return float(((2 * np.arange(1, len(n) + 1) - len(n) - 1) * n).sum() / (len(n) * n.sum()))


def variation(sizes: ArrayLike) -> float:
    """Coefficient of variation: (population) standard deviation over mean."""
    n = np.asarray(sizes, dtype=float)
    return float(n.std() / n.mean())


def feature_skew(x: Tensor, y: Tensor, clients: list[Tensor]) -> float | None:
    """Root mean square distance of client means from the pooled mean within a class, in pooled standard deviations.

    F^2 = sum_{k,c} n_kc [ mean_j (m_kcj - m_cj)^2 / s_cj^2 - (1 / n_kc - 1 / n_c) ] / sum_{k,c} n_kc, at least 0,
    with m, s^2 (unbiased) the means and variances of feature j in class c, for features j that vary. Measuring within a class
    excludes label skew. The subtracted term is the expected value for IID clients. Classes that only one client has cannot be
    separated from label skew and are left out. None if no class remains.
    """
    total = weight = 0.0
    owner = torch.cat([torch.full((len(rows),), k) for k, rows in enumerate(clients)])
    rows = torch.cat(clients)
    for c in range(int(y[rows].max()) + 1):
        at = y[rows] == c
        present, who = np.unique(owner[at].numpy(), return_inverse=True)
        if len(present) < 2:
            continue
        values = as_float(x[rows[at]]).flatten(1)
        n = torch.from_numpy(np.bincount(who)).float()
        sums = torch.zeros(len(present), values.shape[1]).index_add_(0, torch.from_numpy(who), values)
        variance, mean = torch.var_mean(values, dim=0)
        varies = variance > 1e-12
        if not varies.any():
            continue
        apart = ((sums / n[:, None] - mean)[:, varies].square() / variance[varies]).mean(1)
        total += float((n * (apart - 1 / n + 1 / n.sum())).sum())
        weight += float(n.sum())
    return float(np.sqrt(max(0.0, total / weight))) if weight else None


def learnable(split: Split) -> dict[str, Tensor]:
    """The row numbers of each client's train and valid rows."""
    return {name: torch.cat([data.train.index, data.valid.index]) for name, data in split.clients.items()}


def counts(split: Split) -> NDArray[np.int64]:
    """n_kc, (clients, classes)."""
    y, size = split.dataset.labels, len(split.dataset.label_names)
    return np.stack([np.bincount(y[rows].numpy(), minlength=size) for rows in learnable(split).values()])


def of_counts(names: Sequence[str], table: NDArray[np.int64], feature: float | None = None) -> Skew:
    """The measures that follow from the counts n_kc (clients, classes): all but that of features. Without rows, q_k = 0."""
    n = table.sum(1)
    pooled = table.sum(0) / n.sum()
    shares = table / np.maximum(n, 1)[:, None]
    each = tuple(
        ClientSkew(name, int(n[k]), int((table[k] > 0).sum()), entropy(q), kl(q, pooled), js(q, pooled))
        for k, (name, q) in enumerate(zip(names, shares, strict=True))
    )
    kls: Floats = np.array([client.kl for client in each])
    jss: Floats = np.array([client.js for client in each])
    return Skew(
        clients=each,
        kl=float(kls.mean()),
        kl_weighted=float((n * kls).sum() / n.sum()),
        js=float(jss.mean()),
        js_weighted=float((n * jss).sum() / n.sum()),
        classes=float(np.mean([client.classes for client in each])),
        gini=gini(n),
        variation=variation(n),
        smallest=int(n.min()),
        largest=int(n.max()),
        feature=feature,
    )


def measure(split: Split) -> Skew:
    """All measures of a split."""
    feature = feature_skew(split.dataset.x, split.dataset.labels, list(learnable(split).values()))
    return of_counts(list(split.clients), counts(split), feature)
