"""What a node sends about its labels: the number of rows and a summary of their classes, never the labels themselves.

A summary is a plain tree that can be sent and stored:

    {"rows": n, "classes": C, "counts": int64 (C,)}         the label histogram
    {"rows": n, "classes": C, "theta": float64 (M, 3)}      a Gaussian mixture, rows (pi, mu, v); unused rows are zero

The receiver checks a summary with `invalid_reason` before using it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from kilter.core import Tree
from kilter.errors import Mistake

MOST_ROWS = 10**9  # more rows than any node has; a larger claim would only buy weight
MOST_CLASSES = 10**6
SLACK = 1e-6  # tolerance of sums and bounds, for rounding

Summary = dict[str, Tree]


def count(y: Tensor, classes: int) -> Tensor:
    """n_c, (classes,): the number of rows of each class."""
    if y.ndim != 1 or y.is_floating_point() or y.is_complex():
        raise Mistake("Label summaries need class numbers 0, 1, 2, ..., one for each row: this data has other labels.")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise Mistake(f"A label lies outside 0..{classes - 1}: the network must have one output for every class.")
    return torch.bincount(y.long(), minlength=classes)


def invalid_reason(summary: Tree, kind: Literal["counts", "theta"], v_floor: float = 1e-2) -> str | None:
    """Why this is not a valid summary of this kind; None if it is."""
    if not isinstance(summary, Mapping) or set(summary) != {"rows", "classes", kind}:
        return "it is not a label summary"
    rows, classes = summary["rows"], summary["classes"]
    # The claimed value is not repeated: it may be of any length.
    if type(rows) is not int or not 1 <= rows <= MOST_ROWS:
        return f"its number of rows is not within 1..{MOST_ROWS:,}"
    if type(classes) is not int or not 1 <= classes <= MOST_CLASSES:
        return f"its number of classes is not within 1..{MOST_CLASSES:,}"
    if kind == "counts":
        return _invalid_counts(summary["counts"], rows, classes)
    return _invalid_theta(summary["theta"], classes, v_floor)


def _invalid_counts(counts: Tree, rows: int, classes: int) -> str | None:
    if not isinstance(counts, Tensor) or counts.dtype != torch.int64 or counts.shape != (classes,):
        return "its counts are not one whole number for every class"
    if bool((counts < 0).any()):
        return "it has negative counts"
    return None if int(counts.sum()) == rows else f"its counts sum to {int(counts.sum())}, not to its {rows} rows"


def _invalid_theta(theta: Tree, classes: int, v_floor: float) -> str | None:
    if (
        not isinstance(theta, Tensor)
        or theta.dtype != torch.float64
        or theta.ndim != 2
        or theta.shape[1] != 3
        or not 1 <= len(theta) <= classes
    ):
        return "its mixture is not an array of (weight, mean, variance), at most one for every class"
    if not bool(torch.isfinite(theta).all()):
        return "its mixture is not finite"
    if bool((theta[:, 0] < 0).any()) or abs(float(theta[:, 0].sum()) - 1) > SLACK:
        return "its mixture's weights are negative or do not sum to 1"
    _, mu, v = theta[theta[:, 0] > 0].T
    if float(mu.min()) < -SLACK or float(mu.max()) > classes - 1 + SLACK:
        return f"its mixture has means outside the labels 0..{classes - 1}"
    # Labels within 0..C-1 have a variance of at most (C-1)^2/4.
    if float(v.min()) < v_floor - SLACK or float(v.max()) > (classes - 1) ** 2 / 4 + v_floor + SLACK:
        return "its mixture has variances that labels cannot have"
    return None
