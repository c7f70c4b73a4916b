"""Summaries of labels: what is refused, and why."""

from __future__ import annotations

import pytest
import torch

from kilter.blocks.label_summary import count, invalid_reason
from kilter.errors import Mistake

THETA = {"rows": 100, "classes": 10, "theta": torch.tensor([[0.2, 9, 0.1], [0.8, 1.2, 1.3], [0, 0, 0]]).double()}
COUNTS = {"rows": 100, "classes": 3, "counts": torch.tensor([60, 0, 40])}


def theta(*rows):
    return THETA | {"theta": torch.tensor(rows, dtype=torch.float64)}


def test_counts_of_classes():
    assert count(torch.tensor([2, 0, 2]), 4).tolist() == [1, 0, 2, 0]
    assert count(torch.tensor([1], dtype=torch.uint8), 2).tolist() == [0, 1]


@pytest.mark.parametrize("y", [torch.tensor([0.5]), torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([-1])])
def test_labels_that_are_not_classes_are_refused(y):
    with pytest.raises(Mistake):
        count(y, 3)


def test_valid_summaries():
    assert invalid_reason(THETA, "theta") is None
    assert invalid_reason(COUNTS, "counts") is None
    assert invalid_reason(theta([1, 0, 0.01]) | {"rows": 1, "classes": 1}, "theta") is None


@pytest.mark.parametrize(
    ("summary", "why"),
    [
        (None, "not a label summary"),
        (torch.zeros(3), "not a label summary"),
        (COUNTS, "not a label summary"),  # of the other kind
        (THETA | {"more": 1}, "not a label summary"),
        (THETA | {"rows": 10**12}, "number of rows"),
        (THETA | {"rows": 0}, "number of rows"),
        (THETA | {"rows": -5}, "number of rows"),
        (THETA | {"rows": 10**5000}, "number of rows"),
        (THETA | {"rows": True}, "number of rows"),
        (THETA | {"rows": 10.0}, "number of rows"),
        (THETA | {"classes": 10**12}, "number of classes"),
        (THETA | {"classes": 0}, "number of classes"),
        (THETA | {"theta": [[1.0, 0.0, 1.0]]}, "not an array"),
        (THETA | {"theta": torch.ones(1, 2).double()}, "not an array"),
        (THETA | {"theta": torch.ones(3).double()}, "not an array"),
        (THETA | {"theta": torch.ones(1, 3)}, "not an array"),  # float32
        (THETA | {"theta": torch.zeros(11, 3).double()}, "not an array"),  # more components than classes
        (THETA | {"theta": torch.zeros(0, 3).double()}, "not an array"),
        (theta([float("nan"), 1, 1]), "finite"),
        (theta([1, float("inf"), 1]), "finite"),
        (theta([-0.5, 1, 1], [1.5, 2, 1]), "weights"),
        (theta([0.5, 1, 1]), "weights"),
        (theta([0, 0, 0]), "weights"),
        (theta([1, 50, 1]), "means outside the labels 0..9"),
        (theta([1, -1e9, 1]), "means outside"),
        (theta([1, 3, -1]), "variances"),
        (theta([1, 3, 0]), "variances"),
        (theta([1, 3, 1e6]), "variances"),
    ],
)
def test_an_invalid_mixture_is_refused_with_a_reason(summary, why):
    assert why in (invalid_reason(summary, "theta") or "")


@pytest.mark.parametrize(
    ("summary", "why"),
    [
        (THETA, "not a label summary"),
        (COUNTS | {"counts": torch.tensor([60, 40])}, "whole number for every class"),
        (COUNTS | {"counts": torch.tensor([60.0, 0, 40])}, "whole number"),
        (COUNTS | {"counts": torch.tensor([-60, 120, 40])}, "negative"),
        (COUNTS | {"counts": torch.tensor([60, 0, 41])}, "sum to 101, not to its 100 rows"),
        (COUNTS | {"rows": 10**12, "counts": torch.tensor([10**12, 0, 0])}, "rows"),
    ],
)
def test_invalid_counts_are_refused_with_a_reason(summary, why):
    assert why in (invalid_reason(summary, "counts") or "")
