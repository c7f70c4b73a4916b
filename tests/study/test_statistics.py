"""Measures against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kilter.study.statistics import (
    bootstrap_interval,
    bytes_to_target,
    corrected,
    cost_paper,
    curve,
    ecr_paper,
    holm,
    mean_std,
    median_reached,
    paired,
    rounds_to_target,
    sign_flip,
)


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_d10_ecr_of_the_paper() -> None:
    baseline = curve([0.10, 0.30, 0.50, 0.50, 0.60, 0.59])
    feddisk = curve([0.20, 0.55, 0.61, 0.62, 0.62, 0.63])
    actual = ecr_paper({"fedavg": baseline}, {"feddisk": feddisk}, {"feddisk": 2})
    assert actual.target == 0.60
    assert actual.rounds == {"fedavg": 5, "feddisk": 3 + 2}


def test_ecr_of_a_method_that_never_gets_there() -> None:
    actual = ecr_paper({"a": curve([0.5]), "b": curve([0.2, 0.7])}, {"ours": curve([0.6, 0.6])})
    assert actual.rounds == {"a": 1, "b": 2, "ours": None}


def test_d1_cost_of_the_paper() -> None:
    xray = cost_paper([(80, 102_000), (100, 39_000)])
    femnist = cost_paper([(15, 614_000), (105, 447_000)])
    mnist = cost_paper([(70, 47_000), (85, 12_000)])
    assert (xray, femnist, mnist) == (24_120_000, 112_290_000, 8_620_000)
    assert cost_paper([(440, 39_000)]) / xray == pytest.approx(1.422886, abs=1e-6)
    assert 907_410_000 / femnist == pytest.approx(8.080951, abs=1e-6)
    assert cost_paper([(500, 12_000)]) / mnist == pytest.approx(1.392111, abs=1e-6)


def test_target_counts_only_evaluated_rounds() -> None:
    accuracy = {5: 0.4, 10: 0.6, 15: 0.5}
    assert rounds_to_target(accuracy, 0.45) == 10
    assert rounds_to_target(accuracy, 0.6) == 10
    assert rounds_to_target(accuracy, 0.61) is None


def test_bytes_to_target_include_the_set_up_and_rounds_between() -> None:
    spent = {0: 1000, **dict.fromkeys(range(1, 16), 10)}
    assert bytes_to_target({5: 0.4, 10: 0.6}, spent, 0.5) == 1000 + 10 * 10
    assert bytes_to_target({5: 0.4}, spent, 0.5) is None


def test_median_counts_never_as_infinite() -> None:
    assert median_reached([4, 8, None]) == 8
    assert median_reached([4, None, None]) is None
    assert median_reached([4, 8]) == 6
    assert median_reached([4, None]) is None
    assert median_reached([]) is None


def test_mean_and_std() -> None:
    assert mean_std([0.2, 0.4, 0.6]) == pytest.approx((0.4, 0.2))
    assert mean_std([0.2]) == (0.2, None)


def test_sign_flip_by_counting() -> None:
    # |mean| over the 8 signs of (1, 2, 3), times 3: 6 4 2 0 0 2 4 6; at least 6: 2 of 8; of (1, -2, 3), |sum| 2: 6 of 8
    assert sign_flip(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    assert sign_flip(np.array([1.0, -2.0, 3.0])) == pytest.approx(6 / 8)
    assert sign_flip(np.arange(1.0, 6.0)) == pytest.approx(2 / 32)


def test_bootstrap_interval_is_near_the_exact_one() -> None:
    # all 27 resamples of (0, 0, 3) have mean 0 (8), 1 (12), 2 (6) or 3 (1)
    low, high = bootstrap_interval(np.array([0.0, 0.0, 3.0]))
    assert low == 0
    assert high in (2, 3)
    assert bootstrap_interval(np.array([0.5, 0.5, 0.5])) == (0.5, 0.5)


def test_differences_in_words() -> None:
    reference = seeds(0.5, 0.6, 0.7, 0.5, 0.6)
    better = paired({s: a + 0.1 + 0.01 * s for s, a in reference.items()}, reference)
    assert better is not None
    assert better.verdict == "higher"
    assert better.mean == pytest.approx(0.12)
    assert better.low is not None
    assert 0.1 <= better.low <= 0.12 <= (better.high or 0) <= 0.14
    assert better.p == pytest.approx(1 / 16)
    worse = paired({s: a - 0.1 - 0.01 * s for s, a in reference.items()}, reference)
    assert worse is not None
    assert worse.verdict == "lower"
    mixed = paired(seeds(0.6, 0.5, 0.8, 0.4, 0.61), reference)
    assert mixed is not None
    assert mixed.verdict == "no difference shown"
    same = paired(reference, reference)
    assert same is not None
    assert same.verdict == "identical"


def test_a_lucky_interval_is_not_enough() -> None:
    """Four of five seeds better and one worse: p is above the level, so no difference is claimed."""
    actual = paired(seeds(0.6, 0.6, 0.6, 0.6, 0.495), seeds(0.5, 0.5, 0.5, 0.5, 0.5))
    assert actual is not None
    assert actual.p == pytest.approx(2 / 16)
    assert actual.verdict == "no difference shown"


def test_too_few_seeds() -> None:
    two = paired(seeds(0.5, 0.6), seeds(0.1, 0.1))
    assert two is not None
    assert (two.low, two.high, two.p, two.verdict) == (None, None, None, "too few seeds to tell")
    four = paired(seeds(0.5, 0.6, 0.7, 0.8), seeds(0.1, 0.1, 0.1, 0.1))
    assert four is not None
    assert four.low is not None
    assert four.verdict == "too few seeds to tell"
    assert paired({}, seeds(0.1)) is None


def test_only_seeds_that_both_have_are_compared() -> None:
    actual = paired({0: 0.5, 1: 0.9, 7: 0.9}, {0: 0.4, 1: 0.7, 2: 0.0})
    assert actual is not None
    assert actual.seeds == 2
    assert actual.mean == pytest.approx(0.15)


def test_holm_by_hand():
    """Holm 1979: the smallest of four is multiplied by four, the next by three, and none falls below a smaller one's."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_one_comparison_needs_no_correction_and_two_of_five_seeds_cannot_pass_it():
    higher = paired({s: 0.6 + s / 1000 for s in range(5)}, dict.fromkeys(range(5), 0.5))
    assert higher.verdict == "higher"
    alone = corrected({"a": higher})["a"]
    assert (alone.verdict, alone.p_holm) == ("higher", higher.p)
    both = corrected({"a": higher, "b": higher, "c": None})
    assert both["a"].verdict == both["b"].verdict == "higher, uncorrected"
    assert both["a"].p_holm == pytest.approx(2 * higher.p)
    assert both["c"] is None
