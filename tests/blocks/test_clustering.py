"""Clustering of updates: bipartitions by cosine, and HDBSCAN."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.blocks.clustering import bipartition, cosines, hdbscan


@given(st.integers(0, 10_000), st.integers(3, 7))
def test_single_linkage_is_the_optimal_bipartition(seed: int, n: int) -> None:
    cosine = cosines(torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)))
    best = min(
        float(cosine[list(part)][:, [i for i in range(n) if i not in part]].max())
        for size in range(1, n // 2 + 1)
        for part in combinations(range(n), size)
    )
    assert bipartition(cosine, "single")[2] == pytest.approx(best, abs=1e-9)
    left, right, across = bipartition(cosine)
    assert sorted(left + right) == list(range(n))
    assert across >= best - 1e-9


VECTORS = [
    (1, 0.02, 0),
    (1, -0.03, 0.01),
    (1, 0.05, 0.02),
    (0.02, 1, 0),
    (-0.01, 1, 0.03),
    (0.04, 1, -0.02),
    (-1, -1, 0),
]


@pytest.mark.parametrize(("size", "samples"), [(2, 1), (3, 1), (3, 2)])
def test_labels_by_hand(size: int, samples: int) -> None:
    assert hdbscan(cosines(torch.tensor(VECTORS)), size, samples) == [0, 0, 0, 1, 1, 1, -1]


def test_a_single_distant_row_joins_the_nearest_cluster() -> None:
    assert hdbscan(cosines(torch.tensor([*VECTORS[:-1], (0.5, 0.5, -2)])))[-1] == 1


def test_too_few_rows_form_no_cluster() -> None:
    assert hdbscan(cosines(torch.tensor(VECTORS[:1]))) == [-1]
    assert hdbscan(cosines(torch.tensor(VECTORS[:2])), size=3) == [-1, -1]
