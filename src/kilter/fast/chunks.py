"""Which clients train together. It depends on the model and on who takes part, never on the number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from torch import Tensor

from kilter.fast import placement

LARGE = 1_000_000  # weights: from here on, a single client keeps a core busy
COPIES, ACTIVATIONS, WIDEST = 8, 64 << 20, 128  # on an accelerator: models and bytes for a client, clients in a stack
WIDTH_CONV, WIDTH_DENSE = 5, 25  # clients in a stack: wide enough to share overhead, small enough for the caches


def width(params: Mapping[str, Tensor]) -> int:
    """How many clients train in one stack: many if their steps are small, one if they are large.

    The last bits depend on it, so it follows from the size of the model and of the device's memory, never from a timing.
    """
    memory = placement.total_memory(placement.current())
    if memory < inf:  # an accelerator: as many as certainly fit
        each = COPIES * sum(v.nbytes for v in params.values()) + ACTIVATIONS
        return max(1, min(WIDEST, int(memory / 2 / each)))
    if sum(v.numel() for v in params.values()) > LARGE:
        return 1
    return WIDTH_CONV if any(v.dim() > 2 for v in params.values()) else WIDTH_DENSE


def compose(rows: Mapping[str, int], most: int) -> list[list[str]]:
    """Group nodes (with their numbers of rows) into chunks of at most `most`; each chunk is one unit of work.

    The longest come first, so that the nodes of a chunk take nearly the same number of steps. No chunk holds more than half
    of all rows if that can be avoided, so that two processes have work.

    >>> compose({"a": 10, "b": 60, "c": 10, "d": 10, "e": 10}, most=3)
    [['b'], ['a', 'c', 'd'], ['e']]
    """
    chunks: list[list[str]] = []
    half, held = sum(rows.values()) / 2, 0
    for i in sorted(rows, key=lambda i: (-rows[i], i)):
        if not chunks or len(chunks[-1]) == most or held + rows[i] > half:
            chunks.append([])
            held = 0
        chunks[-1].append(i)
        held += rows[i]
    return chunks
