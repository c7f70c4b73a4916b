"""Subjective logic: METHODS' known answers S2-S4, and the algebra's laws."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kilter.blocks.subjective_logic import VACUOUS, Opinion, discount, from_evidence, fuse, fuse_all, threshold

evidence = st.floats(0, 50)
opinions = st.builds(from_evidence, evidence, evidence)


def close(a, b, tolerance=1e-6):
    return a == pytest.approx(b, abs=tolerance)


def test_s2_opinions_follow_the_evidence():
    alpha = beta = 1.0
    for lam, expected in (
        (None, (0.25, 0.25, 0.5)),
        (0.9, (0.38, 0.22, 0.4)),
        (0.8, (0.45, 0.216667, 0.333333)),
        (0.95, (0.521429, 0.192857, 0.285714)),
    ):
        if lam is not None:
            alpha, beta = alpha + lam, beta + 1 - lam
        assert close(from_evidence(alpha, beta), expected)


def test_s2_uncertainty_depends_on_the_number_of_contacts_alone():
    assert close(from_evidence(1 + 2, 1 + 2), (0.375, 0.375, 0.25))  # 1, 0, 1, 0 and four times 0.5
    assert [round(from_evidence(1 + m / 3, 1 + 2 * m / 3).u, 6) for m in range(6)] == [
        0.5,
        0.4,
        0.333333,
        0.285714,
        0.25,
        0.222222,
    ]


def test_s3_discount_and_consensus():
    assert close(discount(Opinion(0.6, 0.1, 0.3), Opinion(0.5, 0.3, 0.2)), (0.30, 0.18, 0.52))
    first = fuse(Opinion(0.30, 0.18, 0.52), Opinion(0.4, 0.2, 0.4))
    assert close(first, (0.460674, 0.247191, 0.292135))
    second = discount(Opinion(0.7, 0.1, 0.2), Opinion(0.2, 0.6, 0.2))
    assert close(second, (0.14, 0.42, 0.44))
    assert close(fuse(first, second), (0.403574, 0.383470, 0.212956))
    assert close(fuse_all([second, Opinion(0.4, 0.2, 0.4), Opinion(0.30, 0.18, 0.52)]), (0.403574, 0.383470, 0.212956))
    assert close(fuse(from_evidence(1.9, 1.1), from_evidence(2.5, 0.5)), (0.55, 0.2, 0.25))
    assert close(fuse(from_evidence(1, 1), from_evidence(1, 1)), (1 / 3, 1 / 3, 1 / 3))
    assert fuse(Opinion(1, 0, 0), Opinion(0, 1, 0)) == (0.5, 0.5, 0)


@pytest.mark.parametrize(
    ("u", "tau", "chosen"),
    [
        ([0.2, 0.3, 0.4, 0.5, 0.9], 0.25, 1),
        ([0.1, 0.4, 0.5, 0.55, 0.6], 0.43, 2),
        ([0.2, 0.3, 0.4, 0.9], 0.25, 1),
        ([0.4, 0.4], 0.4, 2),
        ([0.5], 0.5, 1),
        ([0.4] * 6, 0.4, 6),
    ],
)
def test_s4_threshold(u, tau, chosen):
    assert threshold(u) == pytest.approx(tau, abs=1e-9)
    assert sum(v <= threshold(u) for v in u) == chosen


@given(opinions, opinions)
def test_opinions_stay_opinions(a, b):
    for o in (fuse(a, b), discount(a, b)):
        assert sum(o) == pytest.approx(1, abs=1e-9)
        assert min(o) >= -1e-12


@given(opinions, opinions, opinions)
def test_consensus_commutes_and_associates(a, b, c):
    assert close(fuse(a, b), fuse(b, a), 1e-9)
    assert close(fuse(fuse(a, b), c), fuse(a, fuse(b, c)), 1e-9)


@given(opinions)
def test_the_vacuous_opinion_is_neutral(a):
    assert close(fuse(a, VACUOUS), a, 1e-12)
    assert discount(VACUOUS, a) == VACUOUS


@given(evidence, evidence, evidence, evidence)
def test_consensus_adds_evidence(a, b, c, d):
    assert close(fuse(from_evidence(a, b), from_evidence(c, d)), from_evidence(a + c, b + d), 1e-9)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=30))
def test_at_least_one_peer_is_chosen(u):
    assert min(u) <= threshold(u)
    assume(len(set(u)) == len(u))
    assert sum(v <= threshold(u) for v in u) >= 1
