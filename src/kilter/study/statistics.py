"""Measures of curves, and comparisons of methods over seeds. Pure functions; the statistics are scipy's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kilter.seeds import derive

Curve = Mapping[int, float]  # accuracy by round, for the rounds that were evaluated
CONFIDENCE = 0.95
RESAMPLES = 9999
FEWEST = 3  # fewest seeds for an interval
LEVEL = 0.1  # largest p of a difference that counts; five seeds can reach 1/16, four only 1/8


def curve(values: Sequence[float]) -> dict[int, float]:
    """A curve that was evaluated in every round.

    >>> curve([0.1, 0.3])
    {1: 0.1, 2: 0.3}
    """
    return dict(enumerate(values, start=1))


# The cost of reaching a target ----------------------------------------------------------------------------------------------


def rounds_to_target(accuracy: Curve, target: float) -> int | None:
    """The first evaluated round with accuracy >= target; None if never.

    >>> rounds_to_target({5: 0.4, 10: 0.6}, 0.5), rounds_to_target({5: 0.4}, 0.5)
    (10, None)
    """
    return min((r for r, a in accuracy.items() if a >= target), default=None)


def bytes_to_target(accuracy: Curve, spent: Mapping[int, int], target: float) -> int | None:
    """All bytes sent until the end of the round that reaches the target, set-up (round 0) included; None if never.

    >>> bytes_to_target({1: 0.4, 2: 0.6}, {0: 5, 1: 10, 2: 10}, 0.5)
    25
    """
    reached = rounds_to_target(accuracy, target)
    return None if reached is None else sum(n for r, n in spent.items() if r <= reached)


def round_of_best(accuracy: Curve) -> int:
    """The first round at which the curve is highest."""
    top = max(accuracy.values())
    return min(r for r, a in accuracy.items() if a == top)


@dataclass(frozen=True)
class Ecr:
    """Effective communication rounds as FedDisk's paper counts them."""

    rounds: dict[str, int | None]  # by method; None: a proposed method never reached the target
    target: float  # the best baseline's maximum


def ecr_paper(
    baselines: Mapping[str, Curve], proposed: Mapping[str, Curve], setup: Mapping[str, int] | None = None
) -> Ecr:
    """FedDisk's ECR. It is not like for like: a baseline counts to its own maximum, a proposed method to the baselines'.

    ECR_b = argmax_t a_b(t);  target = max_b max_t a_b(t);  ECR_p = min {t : a_p(t) >= target} + set-up rounds of p.
    `rounds_to_target` asks the same of every method.

    >>> ecr = ecr_paper({"a": curve([0.1, 0.6, 0.5])}, {"b": curve([0.6, 0.7])}, {"b": 2})
    >>> ecr.rounds, ecr.target
    ({'a': 2, 'b': 3}, 0.6)
    """
    target = max(max(c.values()) for c in baselines.values())
    rounds: dict[str, int | None] = {name: round_of_best(c) for name, c in baselines.items()}
    for name, accuracy in proposed.items():
        reached = rounds_to_target(accuracy, target)
        rounds[name] = None if reached is None else reached + (setup or {}).get(name, 0)
    return Ecr(rounds, target)


def cost_paper(phases: Iterable[tuple[int, int]]) -> int:
    """FedDisk's Eq. 18-19: numbers sent per client, C = 2 sum_phases rounds x parameters (down and up).

    >>> cost_paper([(440, 39_000)])
    34320000
    """
    return 2 * sum(rounds * parameters for rounds, parameters in phases)


def median_reached(values: Sequence[int | None]) -> float | None:
    """The median over seeds, where None counts as infinite; None if the median is infinite.

    >>> median_reached([3, None, 5]), median_reached([3, None, None]), median_reached([3, 4])
    (5, None, 3.5)
    """
    if not values:
        return None
    ordered = sorted(math.inf if v is None else v for v in values)
    half = len(ordered) // 2
    value = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return None if math.isinf(value) else value


# Over seeds ---------------------------------------------------------------------------------------------------------


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1) over seeds; one seed has no deviation."""
    v = np.asarray(values, dtype=float)
    return float(v.mean()), float(v.std(ddof=1)) if len(v) > 1 else None


Verdict = Literal[
    "higher",
    "lower",
    "higher, uncorrected",
    "lower, uncorrected",
    "no difference shown",
    "identical",
    "too few seeds to tell",
]


@dataclass(frozen=True)
class Difference:
    """A method minus the reference, seed by seed."""

    mean: float
    low: float | None  # of the bootstrap interval; None with fewer than FEWEST seeds
    high: float | None
    p: float | None  # of the exact sign-flip test, two-sided
    seeds: int
    verdict: Verdict
    p_holm: float | None = None  # p, corrected for the other comparisons with the reference (`corrected`)


def paired(ours: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """d_s = a_s - r_s over the seeds both have: mean, BCa bootstrap interval of the mean, exact sign-flip p, verdict.

    "higher" or "lower" needs an interval without 0 and p <= LEVEL. The interval alone is too narrow with few seeds.
    """
    seeds = sorted(set(ours) & set(reference))
    if not seeds:
        return None
    d = np.array([ours[s] - reference[s] for s in seeds])
    mean = float(d.mean())
    if not d.any():
        return Difference(0.0, 0.0, 0.0, 1.0, len(d), "identical")
    if len(d) < FEWEST:
        return Difference(mean, None, None, None, len(d), "too few seeds to tell")
    low, high = bootstrap_interval(d)
    p = sign_flip(d)
    verdict: Verdict = "no difference shown"
    if low <= 0 <= high:
        pass
    elif p <= LEVEL:
        verdict = "higher" if mean > 0 else "lower"
    elif 2.0 ** (1 - len(d)) > LEVEL:
        verdict = "too few seeds to tell"
    return Difference(mean, low, high, p, len(d), verdict)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction: the k-th smallest of m values is multiplied by m - k + 1, and none falls below a smaller one's.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected = [1.0] * len(ps)
    highest = 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=lambda k: ps[k])):
        highest = max(highest, min(1.0, ps[at] * (len(ps) - rank)))
        corrected[at] = highest
    return corrected


def corrected(differences: Mapping[str, Difference | None]) -> dict[str, Difference | None]:
    """The differences of several methods to one reference, with p and verdict corrected for their number.

    A difference that counts by itself and not after the correction is "higher, uncorrected" or "lower, uncorrected".
    """
    tested = {label: d for label, d in differences.items() if d is not None and d.p is not None}
    ps = dict(zip(tested, holm([d.p for d in tested.values() if d.p is not None]), strict=True))
    words: dict[str, Verdict] = {"higher": "higher, uncorrected", "lower": "lower, uncorrected"}
    changed: dict[str, Difference | None] = dict(differences)
    for label, d in tested.items():
        verdict = d.verdict if ps[label] <= LEVEL else words.get(d.verdict, d.verdict)
        changed[label] = replace(d, p_holm=ps[label], verdict=verdict)
    return changed


def bootstrap_interval(d: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The bias-corrected, accelerated bootstrap interval of the mean; the percentile one where that is undefined."""
    from scipy.stats import bootstrap

    if np.ptp(d) <= 1e-12 * np.abs(d).max():
        return float(d.mean()), float(d.mean())
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a degenerate BCa gives NaN, which is checked below
            interval = bootstrap(
                (d,),
                np.mean,
                n_resamples=RESAMPLES,
                confidence_level=CONFIDENCE,
                method=method,
                random_state=np.random.default_rng(derive("bootstrap", len(d))),
            ).confidence_interval
        if np.isfinite([interval.low, interval.high]).all():
            break
    return float(interval.low), float(interval.high)


def sign_flip(d: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Two-sided p of mean(d) under all 2^n changes of sign (all while they are at most 2^16, else RESAMPLES drawn)."""
    from scipy.stats import permutation_test

    def mean(
        x: np.ndarray[tuple[int, ...], np.dtype[np.float64]], axis: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.asarray(np.mean(x, axis=axis))

    test = permutation_test(
        (d,),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**16 if len(d) <= 16 else RESAMPLES,
        random_state=np.random.default_rng(derive("sign flip", len(d))),
    )
    return float(test.pvalue)
