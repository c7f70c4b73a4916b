"""Gaussian mixtures of class labels: EM, the number of components by BIC, and the mass a mixture gives to each class.

A mixture theta is an array (M, 3) with a row (pi_m, mu_m, v_m) for each component. Labels are counts n_c of the classes
c = 0, 1, ..., C - 1, which is all that EM needs.

We do not use scikit-learn's GaussianMixture for three reasons. It adds `reg_covar` to every variance, while we need the bound
v >= v_floor: labels are whole numbers, so components shrink onto single classes, and a different likelihood changes the number of
components that BIC chooses. It takes no counts, so it iterates over n_k rows instead of C classes (ten times slower for 255 rows).
And it refuses a single row. Where the bound is inactive, both give the same numbers (tests/blocks/density/test_mixture.py).
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]

ITERATIONS = 1500  # most iterations of EM
PATIENCE = 5  # numbers of components in a row that do not lower BIC, after which larger ones are not tried


def fit(
    counts: ArrayLike,
    components: int,
    v_floor: float = 1e-2,
    tolerance: float = 1e-6,
    start: Floats | None = None,
    eps: float = 0.0,
) -> Floats:
    """EM for a mixture of this many components: gamma_cm ~ pi_m N(c; mu_m, v_m), then weighted moments, v_m >= v_floor.

    Starts from pi = 1/M, v = var(y) and mu at M evenly spaced (Hazen) quantiles of the labels that occur, which are distinct.
    Stops when the log-likelihood changes by less than the tolerance. `start` gives other means; `eps` is added to each density sum.

    >>> fit([30, 10, 0, 0, 0, 0, 0, 0, 40, 20], components=2).round(4).tolist()
    [[0.4, 0.25, 0.1875], [0.6, 8.3333, 0.2222]]
    """
    n = np.asarray(counts, dtype=float)
    c = np.flatnonzero(n).astype(float)
    n = n[n > 0]
    if not 1 <= components <= len(c):
        raise ValueError(f"{components} components for {len(c)} labels")
    centre = float(n @ c / n.sum())
    spread = max(float(n @ (c - centre) ** 2 / n.sum()), v_floor)
    pi = np.full(components, 1 / components)
    mu = np.quantile(c, (np.arange(components) + 0.5) / components, method="hazen") if start is None else start
    v = np.full(components, spread)
    last = -np.inf
    for _ in range(ITERATIONS):
        joint = _log_joint(np.stack([pi, mu, v], axis=1), c)  # (classes, M)
        evidence = _log_sum(joint)
        lnl = float(n @ evidence)
        if abs(lnl - last) < tolerance:
            break
        last = lnl
        if eps:
            evidence = np.log(np.exp(evidence) + eps)
        gamma = n[:, None] * np.exp(joint - evidence[:, None])
        mass = np.maximum(gamma.sum(0), 1e-300)  # a component without any label keeps pi = 0
        pi, mu = mass / (mass.sum() if eps else n.sum()), c @ gamma / mass
        v = np.maximum((gamma * (c[:, None] - mu) ** 2).sum(0) / mass, v_floor)
    return np.stack([pi, mu, v], axis=1)


def choose(counts: ArrayLike, rho: float = 0.5, v_floor: float = 1e-2, tolerance: float = 1e-6) -> Floats:
    """The mixture of 1 to ceil(rho |Y|) components with the lowest BIC; the smaller one in a tie.

    Stops after PATIENCE numbers in a row without improvement: with 300 classes, 150 numbers would take minutes.
    """
    limit = most(int(np.count_nonzero(counts)), rho)
    best, least, stale = None, np.inf, 0
    for m in range(1, limit + 1):
        theta = fit(counts, m, v_floor, tolerance)
        criterion = bic(theta, counts)
        if criterion < least:
            best, least, stale = theta, criterion, 0
        elif (stale := stale + 1) >= PATIENCE:
            break
    assert best is not None
    return best


def choose_as_listed(
    counts: ArrayLike, rho: float, v_floor: float, tolerance: float, rng: np.random.Generator
) -> Floats:
    """The mixture as FedEP's Listing 5.2 chooses it: EM from random labels, .01 added to densities, a penalty of (M - 1) ln n."""
    n = np.asarray(counts, dtype=float)
    labels = np.flatnonzero(n).astype(float)
    best, least = None, np.inf
    for m in range(1, most(len(labels), rho) + 1):
        mu = rng.choice(labels, m, replace=False, p=n[n > 0] / n.sum())
        theta = fit(counts, m, v_floor, tolerance, start=mu, eps=0.01)
        joint = np.exp(_log_joint(theta, labels))
        gamma = joint / (joint.sum(axis=1, keepdims=True) + 0.01)
        expected = float((n[n > 0][:, None] * gamma * np.log(joint + 0.01)).sum())
        criterion = -2 * expected + (m - 1) * float(np.log(n.sum()))
        if criterion < least:
            best, least = theta, criterion
    assert best is not None
    return best


def most(labels: int, rho: float = 0.5) -> int:
    """M_max = ceil(rho |Y|): at least one component, at most one for each label.

    >>> [most(labels) for labels in (1, 2, 3, 5, 10)]
    [1, 1, 2, 3, 5]
    """
    return min(max(ceil(rho * labels - 1e-9), 1), max(labels, 1))


def log_likelihood(theta: Floats, counts: ArrayLike) -> float:
    """sum_c n_c ln sum_m pi_m N(c; mu_m, v_m)."""
    n = np.asarray(counts, dtype=float)
    c = np.flatnonzero(n)
    return float(n[c] @ _log_sum(_log_joint(theta, c.astype(float))))


def bic(theta: Floats, counts: ArrayLike) -> float:
    """-2 lnL + (3 M - 1) ln n: a weight, a mean and a variance for each component, minus one because the weights sum to 1."""
    return -2 * log_likelihood(theta, counts) + (3 * len(theta) - 1) * float(np.log(np.sum(counts)))


def density(theta: Floats, classes: int) -> Floats:
    """The density at 0, 1, ..., classes - 1. It need not sum to 1."""
    pi, mu, v = theta.T
    return np.exp(-((np.arange(classes)[:, None] - mu) ** 2) / (2 * v)) @ (pi / np.sqrt(2 * np.pi * v))


def bins(theta: Floats, classes: int) -> Floats:
    """The mass in [c - 1/2, c + 1/2] for each class c. The first and last bins are open, so it sums to 1."""
    pi, mu, v = theta.T
    edges = np.concatenate([[-np.inf], np.arange(classes - 1) + 0.5, [np.inf]])
    return np.diff(ndtr((edges[:, None] - mu) / np.sqrt(v)), axis=0) @ pi


def _log_joint(theta: Floats, at: Floats) -> Floats:
    """ln pi_m N(y; mu_m, v_m), (y, M)."""
    pi, mu, v = theta.T
    with np.errstate(divide="ignore"):  # pi may be 0
        return np.log(pi) - 0.5 * (np.log(2 * np.pi * v) + (at[:, None] - mu) ** 2 / v)


def _log_sum(joint: Floats) -> Floats:
    """ln sum_m exp, without underflow; scipy's logsumexp would take most of EM's time."""
    top = joint.max(axis=1)
    return np.asarray(top + np.log(np.exp(joint - top[:, None]).sum(axis=1)), dtype=np.float64)
