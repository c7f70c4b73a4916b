"""Subjective logic (Jøsang): opinions (similarity s, dissimilarity d, uncertainty u), s + d + u = 1, and their algebra.

Evidence (alpha, beta) for and against gives (s, d, u) = (alpha, beta, W) / (alpha + beta + W) with W = 2. Opinions travel by
`discount` (what I think of you times what you think of them) and are joined by `fuse` (consensus).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

W = 2.0  # weight of not knowing
TOLERANCE = 1e-12


class Opinion(NamedTuple):
    """s + d + u = 1, all at least 0."""

    s: float
    d: float
    u: float


def is_opinion(told: object) -> bool:
    """Whether what someone told is one.

    >>> is_opinion((0.25, 0.25, 0.5)), is_opinion((2.0, -1.5, 0.5)), is_opinion("trust me")
    (True, False, False)
    """
    return (
        isinstance(told, tuple)
        and len(told) == 3
        and all(isinstance(part, float) and 0 <= part <= 1 for part in told)
        and abs(sum(told) - 1) < 1e-6
    )


VACUOUS = Opinion(0.0, 0.0, 1.0)


def from_evidence(alpha: float, beta: float) -> Opinion:
    """The opinion behind this much evidence.

    >>> from_evidence(1.0, 1.0)
    Opinion(s=0.25, d=0.25, u=0.5)
    """
    total = alpha + beta + W
    return Opinion(alpha / total, beta / total, W / total)


def discount(mine: Opinion, yours: Opinion) -> Opinion:
    """What I may think of someone from hearsay: your opinion, weighed by mine of you."""
    return Opinion(mine.s * yours.s, mine.s * yours.d, mine.d + mine.u + mine.s * yours.u)


def fuse(a: Opinion, b: Opinion) -> Opinion:
    """Consensus of two independent opinions; of two certain ones the mean.

    k = u1 + u2 - u1 u2;  s = (s1 u2 + s2 u1) / k,  d likewise,  u = u1 u2 / k. Evidence adds up.
    """
    k = a.u + b.u - a.u * b.u
    if k <= 0:
        return Opinion((a.s + b.s) / 2, (a.d + b.d) / 2, 0.0)
    return Opinion((a.s * b.u + b.s * a.u) / k, (a.d * b.u + b.d * a.u) / k, a.u * b.u / k)


def fuse_all(opinions: Iterable[Opinion]) -> Opinion:
    """Consensus of many; nothing known is the vacuous opinion."""
    return reduce(fuse, opinions, VACUOUS)


def threshold(uncertainties: Sequence[float]) -> float:
    """Up to which uncertainty one is chosen (SLFed Eq. 16): the mean if it is below the median, else the mean of the
    floor(N/2) smallest (at least one); with a tolerance against rounding.

    >>> round(threshold([0.2, 0.3, 0.4, 0.5, 0.9]), 9), round(threshold([0.1, 0.4, 0.5, 0.55, 0.6]), 9)
    (0.25, 0.43)
    """
    ordered = sorted(uncertainties)
    n = len(ordered)
    mean = sum(ordered) / n
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    if mean < median - TOLERANCE:
        return mean + TOLERANCE
    least = ordered[: max(1, n // 2)]
    return sum(least) / len(least) + TOLERANCE
