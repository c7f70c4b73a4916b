"""Targets of tasks other than classification: numbers, times with events, several labels, next tokens.

`y` holds the targets. `strata` holds a small class for each row, so that partition rules and held-out rows can follow the target: a
tenth of the numbers, the event and half of the times, or the rarest label of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kilter.data.columns import LARGEST, Parsed, as_numbers
from kilter.data.schema import Column
from kilter.data.tables import Table
from kilter.errors import Mistake, unknown

TASKS = ("regression", "survival", "multi-label", "next-token")  # that are not about classes of rows
BINS = 10  # classes of numbers
SEQUENCE = 64  # tokens of a text
IGNORED = -100  # the target of padding

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of a table's rows."""

    y: NDArray[np.float32] | Index
    strata: Index
    classes: tuple[str, ...]  # names of the labels, or of the target
    columns: tuple[Column, ...] = ()  # whose statistics are pooled: numbers
    raw: dict[str, Parsed] | None = None


def names_of(task: str, label: str, event: str) -> list[str]:
    """The columns that the options name as targets."""
    names = [name.strip() for name in label.split(",") if name.strip()] if task == "multi-label" else [label]
    return [*names, event] if task == "survival" else names


def read_targets(table: Table, task: str, label: str, event: str) -> Targets:
    """The targets of a table for one of TASKS. `label` is the column; several, separated by commas, for multi-label."""
    if task == "next-token":
        empty = np.zeros(len(table), dtype=np.int64)
        return Targets(empty, empty, ("token",))
    if task == "survival" and not event:
        raise Mistake("The task survival needs two columns: --label names the time, and --event the event (1 or 0).")
    names = names_of(task, label, event)
    for name in names:
        if name not in table.columns:
            raise unknown(f"column of a target in '{table.name}'", name, table.columns)
    numbers = np.stack([_numbers(table, name) for name in names], axis=1)
    if task == "regression":
        targets = from_numbers(task, numbers[:, 0], names[0])
        return Targets(targets.y, targets.strata, (names[0],), (_column(names[0]),), _parsed(names, numbers))
    if task == "survival":
        _check_zero_one(table.name, names[1], numbers[:, 1])
        if (numbers[:, 0] < 0).any():
            raise Mistake(f"Column '{names[0]}' of '{table.name}' has a negative time: a time is at least 0.")
        targets = from_numbers(task, numbers, names[0])
        return Targets(
            targets.y, targets.strata, (names[0],), (_column(names[0]), _column(names[1])), _parsed(names, numbers)
        )
    for at, name in enumerate(names):
        _check_zero_one(table.name, name, numbers[:, at])
    return from_numbers(task, numbers, "", tuple(names))


def _column(name: str) -> Column:
    return Column(name, "number")


def _parsed(names: list[str], numbers: NDArray[np.float64]) -> dict[str, Parsed]:
    return {name: Parsed("number", numbers[:, at]) for at, name in enumerate(names)}


def _numbers(table: Table, name: str) -> NDArray[np.float64]:
    cells = table.columns[name]
    numbers = as_numbers(cells, table.decimal_commas)
    if numbers is None:
        raise Mistake(f"Column '{name}' of '{table.name}' does not hold numbers: this task needs them.")
    gaps = np.flatnonzero(~np.isfinite(numbers))
    if len(gaps):
        raise Mistake(
            f"Column '{name}' has no number in {table.places(gaps)}: fill in or remove {len(gaps)} rows like this."
        )
    if np.abs(numbers).max(initial=0) > LARGEST:
        raise Mistake(f"Column '{name}' of '{table.name}' holds a number beyond {LARGEST:g}: correct it.")
    return numbers


def _check_zero_one(where: str, name: str, numbers: NDArray[np.float64]) -> None:
    if not np.isin(numbers, (0, 1)).all():
        wrong = next(n for n in numbers if n not in (0, 1))
        raise Mistake(f"Column '{name}' of '{where}' holds {wrong:g}: it may only hold 0 and 1.")


def from_numbers(task: str, y: NDArray[np.float64], name: str = "", classes: tuple[str, ...] = ()) -> Targets:
    """Targets from arrays: numbers (n,), times and events (n, 2), or labels (n, k)."""
    y32 = y.astype(np.float32)
    if task == "regression":
        if y.ndim != 1:
            raise Mistake(f"A regression has one number for each row, and y has the shape {y.shape}.")
        return Targets(y32, bins(y, BINS), (name or "y",))
    if y.ndim != 2 or (task == "survival" and y.shape[1] != 2):
        wanted = "(rows, 2): time and event" if task == "survival" else "(rows, labels)"
        raise Mistake(f"The task {task} needs y of shape {wanted}, not {y.shape}.")
    if task == "survival":
        return Targets(y32, bins(y[:, 0], 2) + 2 * y[:, 1].astype(np.int64), (name or "time",))
    rare = np.argsort(y.sum(0), kind="stable")  # the rarest label first
    strata = np.full(len(y), len(rare), dtype=np.int64)
    for place in rare[::-1]:
        strata[y[:, place] > 0] = place
    return Targets(y32, strata, classes or tuple(f"label{k}" for k in range(y.shape[1])))


def bins(numbers: NDArray[np.float64], count: int) -> Index:
    """The part of the range, by quantiles, in which each number lies: 0 to count - 1.

    >>> bins(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist()
    [0, 0, 1, 1]
    """
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, count + 1)[1:-1]))
    return np.searchsorted(edges, numbers, side="left").astype(np.int64)


def next_tokens(x: NDArray[np.float32]) -> Index:
    """The token after each; padding (0) and what follows the last token count for nothing."""
    following = np.zeros(x.shape, dtype=np.int64)
    following[:, :-1] = x[:, 1:]
    return np.where(following == 0, IGNORED, following)
