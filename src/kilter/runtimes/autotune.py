"""`--workers auto`: how many processes share a step, and how many chunks of nodes each takes at once, found by timing.

Nothing else depends on it, least of all the numbers: who is trained with whom, which shows in the last bits, is decided by who
takes part (`kilter.fast`) and so is not tried out. With a fixed number of workers only the chunks are.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import NamedTuple

TIMES = 2  # how often each share is timed: the first time pays for warming up


class Share(NamedTuple):
    """How a step is shared out."""

    workers: int
    chunks: int = 1  # in one order to a worker


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Pace:
    """Begins with all the workers, then half as many, and so on until that is slower; then, with the fastest number of them, orders
    of two chunks, four, and so on until that is slower; then stays with the fastest.

    Steps differ (training, evaluation), so each is timed by itself.
    """

    most: int  # workers
    least: int = 1
    seen: dict[str, dict[Share, list[float]]] = field(default_factory=dict)  # step: share: seconds a piece of work

    def choose(self, step: str, chunks: int) -> Share:
        """How a step of so many chunks is to be shared out now."""
        tried = self.seen.setdefault(step, {})
        fewer = [Share(self.most >> k) for k in range(self.most.bit_length()) if self.most >> k >= self.least]
        best = _fastest(tried, fewer)
        if len(tried.get(best, ())) < TIMES or best.workers == 1:
            return best
        larger = [Share(best.workers, 1 << k) for k in range(1, chunks.bit_length())]
        return _fastest(tried, [best, *(s for s in larger if _longest(s, chunks) == _longest(best, chunks))])

    def timed(self, step: str, share: Share, seconds: float, work: int) -> None:
        """So long it took."""
        if work:
            self.seen.setdefault(step, {}).setdefault(share, []).append(seconds / work)


def _longest(share: Share, chunks: int) -> int:
    """How many of the chunks the busiest worker has to do."""
    orders = -(-chunks // share.chunks)
    return -(-orders // share.workers) * share.chunks


def _fastest(tried: dict[Share, list[float]], shares: list[Share]) -> Share:
    """The first that has not been timed often enough; or the fastest of those before one that was slower."""
    best, least = shares[0], math.inf
    for share in shares:
        seconds = tried.get(share, [])
        if len(seconds) < TIMES:
            return share
        if min(seconds) > least:
            break
        best, least = share, min(seconds)
    return best
