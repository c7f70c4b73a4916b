"""`--workers auto`: how many processes share a step, found by timing. Nothing else depends on it, least of all the numbers.

Who is trained with whom is decided by who takes part (`kilter.stacking`), as that shows in the last bits; so it is not tried out.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

TIMES = 2  # how often each number is timed: the first time pays for warming up


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Pace:
    """Begins with all the workers, then half as many, and so on until that is slower; then stays with the fastest.

    Steps differ (training, evaluation), so each is timed by itself.
    """

    most: int
    seen: dict[str, dict[int, list[float]]] = field(default_factory=dict)  # step: workers: seconds a piece of work

    def choose(self, step: str) -> int:
        """How many workers are to share this step now."""
        tried = self.seen.setdefault(step, {})
        count, best = self.most, math.inf
        while count:
            if len(tried.get(count, ())) < TIMES:
                return count
            if min(tried[count]) > best:
                break  # fewer will be slower still
            count, best = count // 2, min(tried[count])
        return min(tried, key=lambda n: min(tried[n]))

    def timed(self, step: str, workers: int, seconds: float, work: int) -> None:
        """So long it took."""
        if work:
            self.seen.setdefault(step, {}).setdefault(workers, []).append(seconds / work)
