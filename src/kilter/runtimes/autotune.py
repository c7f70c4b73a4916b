"""`--workers auto`: choose by timing how many processes split a step, and how many chunks of nodes each takes at once.

Results do not depend on this choice. Which clients train together shows in the last bits, so it is fixed by who takes part
(`kilter.fast.chunks`) and not tuned. With a fixed number of workers, only the number of chunks is tuned.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import NamedTuple

TIMES = 2  # timings of each split: the first includes warm-up


class WorkSplit(NamedTuple):
    """How a step is divided among workers."""

    workers: int
    chunks: int = 1  # per request to a worker


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class AutoTuner:
    """Tries all workers, then half as many, until that is slower; then, with the fastest number, requests of two chunks, four,
    until that is slower. Then keeps the fastest.

    Steps differ (training, evaluation), so each is timed separately.
    """

    most: int  # workers
    least: int = 1
    timings: dict[str, dict[WorkSplit, list[float]]] = field(
        default_factory=dict
    )  # step -> split -> seconds per unit of work

    def choose(self, step: str, chunks: int) -> WorkSplit:
        """How to divide a step with this many chunks now."""
        tried = self.timings.setdefault(step, {})
        fewer = [WorkSplit(self.most >> k) for k in range(self.most.bit_length()) if self.most >> k >= self.least]
        best = _fastest(tried, fewer)
        if len(tried.get(best, ())) < TIMES or best.workers == 1:
            return best
        larger = [WorkSplit(best.workers, 1 << k) for k in range(1, chunks.bit_length())]
        return _fastest(tried, [best, *(s for s in larger if _longest(s, chunks) == _longest(best, chunks))])

    def record(self, step: str, split: WorkSplit, seconds: float, work: int) -> None:
        """Record a timing."""
        if work:
            self.timings.setdefault(step, {}).setdefault(split, []).append(seconds / work)


def _longest(split: WorkSplit, chunks: int) -> int:
    """How many chunks the busiest worker has."""
    requests = -(-chunks // split.chunks)
    return -(-requests // split.workers) * split.chunks


def _fastest(tried: dict[WorkSplit, list[float]], splits: list[WorkSplit]) -> WorkSplit:
    """The first split that has not been timed often enough, otherwise the fastest before times rise."""
    best, least = splits[0], math.inf
    for split in splits:
        seconds = tried.get(split, [])
        if len(seconds) < TIMES:
            return split
        if min(seconds) > least:
            break
        best, least = split, min(seconds)
    return best
