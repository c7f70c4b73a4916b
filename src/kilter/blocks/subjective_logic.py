"""Subjective logic (Jøsang): opinions (similarity s, dissimilarity d, uncertainty u), s + d + u = 1, and their algebra.

Evidence (alpha, beta) for and against gives (s, d, u) = (alpha, beta, W) / (alpha + beta + W) with W = 2. `discount` weighs an
opinion heard from a peer by one's opinion of that peer; `fuse` combines independent opinions (consensus).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

W = 2.0  # weight of the prior, that is, of uncertainty
TOLERANCE = 1e-12


class Opinion(NamedTuple):
    """s + d + u = 1, all at least 0."""

    s: float
    d: float
    u: float


def is_opinion(value: object) -> bool:
    """Whether a received value is a valid opinion.

    >>> is_opinion((0.25, 0.25, 0.5)), is_opinion((2.0, -1.5, 0.5)), is_opinion("trust me")
    (True, False, False)
    """
    return (
        isinstance(value, tuple)
        and len(value) == 3
        and all(isinstance(part, float) and 0 <= part <= 1 for part in value)
        and abs(sum(value) - 1) < 1e-6
    )


VACUOUS = Opinion(0.0, 0.0, 1.0)


def from_evidence(alpha: float, beta: float) -> Opinion:
    """The opinion that this evidence gives.

    >>> from_evidence(1.0, 1.0)
    Opinion(s=0.25, d=0.25, u=0.5)
    """
    total = alpha + beta + W
    return Opinion(alpha / total, beta / total, W / total)


def discount(mine: Opinion, yours: Opinion) -> Opinion:
    """My opinion of a third party from your opinion of it (`yours`) and my opinion of you (`mine`)."""
    return Opinion(mine.s * yours.s, mine.s * yours.d, mine.d + mine.u + mine.s * yours.u)


def fuse(a: Opinion, b: Opinion) -> Opinion:
    """Consensus of two independent opinions; the mean of two that are certain.

    k = u1 + u2 - u1 u2;  s = (s1 u2 + s2 u1) / k,  d likewise,  u = u1 u2 / k. Evidence adds up.
    """
    k = a.u + b.u - a.u * b.u
    if k <= 0:
        return Opinion((a.s + b.s) / 2, (a.d + b.d) / 2, 0.0)
    return Opinion((a.s * b.u + b.s * a.u) / k, (a.d * b.u + b.d * a.u) / k, a.u * b.u / k)


def fuse_all(opinions: Iterable[Opinion]) -> Opinion:
    """Consensus of many opinions; the vacuous opinion if there are none."""
    return reduce(fuse, opinions, VACUOUS)


def threshold(uncertainties: Sequence[float]) -> float:
    """The largest uncertainty at which a peer is chosen (SLFed Eq. 16): the mean if it is below the median, else the mean of the
    floor(N/2) smallest (at least one). A small tolerance absorbs rounding.

    >>> round(threshold([0.2, 0.3, 0.4, 0.5, 0.9]), 9), round(threshold([0.1, 0.4, 0.5, 0.55, 0.6]), 9)
    (0.25, 0.43)
    """
    ordered = sorted(uncertainties)
    n = len(ordered)
    mean = sum(ordered) / n
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    if mean < median - TOLERANCE:
        return mean + TOLERANCE
    smallest = ordered[: max(1, n // 2)]
    return sum(smallest) / len(smallest) + TOLERANCE
