"""Divide rows into training and test rows, always the same way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kilter.errors import Mistake
from kilter.seeds import numpy_generator

Index = NDArray[np.int64]


def hold_out(y: Index, groups: Index | None = None, every: int = 5) -> tuple[Index, Index]:
    """Training and test rows. One row in `every` is a test row, evenly from each group and class, always the same ones."""
    order = _even_order(y, groups)
    test = np.sort(order[min(every // 2, len(y) - 1) :: every])
    return _others(test, len(y)), test


def hold_out_share(y: Index, groups: Index | None, share: float) -> tuple[Index, Index]:
    """Training and test rows. This share of the rows are test rows, evenly from each group and class."""
    order = _even_order(y, groups)
    steps = np.floor(share * np.arange(len(y) + 1) + 0.5)
    test = np.sort(order[np.diff(steps) > 0])
    if not 0 < len(test) < len(y):
        raise Mistake(f"A test share of {share:g} leaves no training or no test rows of {len(y)}: choose another.")
    return _others(test, len(y)), test


def _even_order(y: Index, groups: Index | None) -> Index:
    """Row numbers sorted by group and class, in a fixed random order within each."""
    if len(y) < 2:
        raise Mistake("One row cannot be divided into training and test rows: the data needs at least two.")
    order_within = numpy_generator(0, "hold out").permutation(len(y))
    return np.lexsort((order_within, y) if groups is None else (order_within, y, groups))


def _others(chosen: Index, count: int) -> Index:
    """The row numbers below `count` that were not chosen."""
    left = np.ones(count, dtype=bool)
    left[chosen] = False
    return np.flatnonzero(left)
