"""Secret shares: sums are exact, what is missing hides everything, and nothing wraps around unnoticed."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kilter.blocks import secret_sharing
from kilter.blocks.secret_sharing import P

tensors = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=20).map(torch.tensor)


@given(tensors, st.integers(2, 9))
def test_ring_shares_add_up_exactly(x, n):
    ring = secret_sharing.to_ring(x, n)
    assert torch.equal(secret_sharing.join(secret_sharing.split(ring, n)), ring)
    assert (secret_sharing.from_ring(ring) - x.double()).abs().max() <= 2.0**-33


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=6))
def test_sums_of_shares_are_shares_of_sums(numbers):
    values, n = [torch.tensor([v]) for v in numbers], len(numbers)
    shares = [secret_sharing.split(secret_sharing.to_ring(v, n), n) for v in values]
    sums = [secret_sharing.join([s[j] for s in shares]) for j in range(n)]
    exact = sum(v.double() for v in values)
    assert float((secret_sharing.from_ring(secret_sharing.join(sums)) - exact).abs()) <= n * 2.0**-33


def test_fewer_than_all_ring_shares_are_uniform_whatever_the_secret():
    """Every proper subset's sum, for two very different secrets, over the top byte: a chi-squared test."""
    n, draws = 3, 40_000
    for value in (0.0, 123456.789):
        shares = secret_sharing.split(secret_sharing.to_ring(torch.full((draws,), value), n), n)
        for k in (1, 2):
            for some in combinations(range(n), k):
                top = (secret_sharing.join([shares[j] for j in some]) >> 56).numpy() & 255
                assert stats.chisquare(np.bincount(top, minlength=256)).pvalue > 1e-6


def test_two_splits_of_one_number_are_independent():
    x = secret_sharing.to_ring(torch.ones(1000), 3)
    a, b = secret_sharing.split(x, 3), secret_sharing.split(x, 3)
    assert all(not torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("shared", [secret_sharing.to_ring, secret_sharing.to_field])
def test_numbers_that_could_overflow_are_refused(shared):
    shared(torch.tensor([1e6]), 10)
    for bad in (1e12, float("nan"), float("inf")):
        with pytest.raises(secret_sharing.Overflow):
            shared(torch.tensor([0.0, bad]), 10)


def test_s5_additive_masks_by_hand():
    scaled = torch.tensor([0.5, 1.0, -0.5])
    masks = [torch.tensor([3.0, -7.0, 2.0]), torch.tensor([-1.5, 4.0, 9.0])]
    own = scaled - sum(masks)
    assert own.tolist() == [-1.0, 4.0, -11.5]
    assert (own + sum(masks)).tolist() == [0.5, 1.0, -0.5]


def test_scalar_shares_leak_the_direction_and_sum_up():
    x = {"layer": torch.randn(100)}
    shares = secret_sharing.scalar_shares(x, 3, torch.Generator().manual_seed(0))
    assert torch.allclose(sum(s["layer"] for s in shares), x["layer"], atol=1e-6)
    for s in shares:
        assert torch.cosine_similarity(s["layer"], x["layer"], dim=0) > 0.999999


def test_ring_shares_do_not_leak_the_direction():
    x = torch.randn(10_000)
    for share in secret_sharing.split(secret_sharing.to_ring(x, 3), 3):
        assert abs(float(torch.cosine_similarity(share.double(), x.double(), dim=0))) < 0.05


elements = st.integers(0, P - 1)


@given(
    st.integers(1, 4).flatmap(lambda t: st.lists(st.lists(elements, min_size=t, max_size=t), min_size=2, max_size=4))
)
def test_products_of_matrices_in_the_field_are_exact(rows):
    """The last row is a column of numbers; the others are the matrix."""
    *matrix, column = rows
    product = secret_sharing.combine(matrix, np.array(column, dtype=np.uint64)[:, None])
    assert [int(v) for v in product[:, 0]] == [
        sum(a * b for a, b in zip(row, column, strict=True)) % P for row in matrix
    ]


def test_products_are_exact_with_the_largest_numbers_and_many_terms():
    t = 300
    product = secret_sharing.combine([[P - 1] * t], np.full((t, 3), P - 1, dtype=np.uint64))
    assert product.tolist() == [[t * (P - 1) ** 2 % P] * 3]


@given(tensors, st.integers(2, 6), st.data())
def test_any_threshold_of_shares_recovers(x, n, data):
    t = data.draw(st.integers(2, n))
    shares = secret_sharing.deal(secret_sharing.to_field(x, n), n, t)
    who = data.draw(st.permutations(range(1, n + 1)))[: data.draw(st.integers(t, n))]
    back = secret_sharing.from_field(secret_sharing.recover({j: shares[j - 1] for j in who}))
    assert (back - x.double()).abs().max() <= 2.0**-33


def test_threshold_shares_below_the_threshold_are_uniform():
    x = secret_sharing.to_field(torch.full((40_000,), 7.0), 5)
    for share in secret_sharing.deal(x, 5, 3)[:3]:
        assert stats.chisquare(np.bincount((share >> np.uint64(53)).astype(int), minlength=256)).pvalue > 1e-6


def test_fewer_than_threshold_do_not_recover():
    random.seed(0)
    x = secret_sharing.to_field(torch.ones(50), 5)
    shares = secret_sharing.deal(x, 5, 3)
    wrong = secret_sharing.recover({1: shares[0], 2: shares[1]})
    assert (wrong != x).all()


def test_sums_of_threshold_shares():
    a, b = torch.randn(30), torch.randn(30)
    deals = [secret_sharing.deal(secret_sharing.to_field(v, 4), 4, 3) for v in (a, b)]
    sums = [secret_sharing.field_sum([d[j].view(np.int64) for d in deals]).view(np.uint64) for j in range(4)]
    back = secret_sharing.from_field(secret_sharing.recover({j + 1: sums[j] for j in (0, 2, 3)}))
    assert torch.allclose(back, a.double() + b.double(), atol=1e-8)
