"""Density ratios: known answers D4 to D8, and weights with mean one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter import Data
from kilter.blocks.density.ratio import (
    classify,
    effective_size,
    labelled,
    normalised,
    weights_by_classifier,
    weights_by_density,
)
from kilter.core import Node
from kilter.train import run_one
from small import every, known_made

RULES = ["llr", "dre", "odds", "prob", "minmax2", "tri"]


def close(actual, expected, tolerance=1e-6):
    return [float(v) for v in actual] == pytest.approx(expected, abs=tolerance)


def test_odds_of_an_exact_classifier_are_the_ratio():  # D4
    x = torch.tensor([-1, 0, 0.5, 1, 2], dtype=torch.float64)
    p = torch.sigmoid(x - 0.5)
    assert close(p, [0.182426, 0.377541, 0.5, 0.622459, 0.817574])
    assert close(weights_by_classifier(p), [0.223130, 0.606531, 1, 1.648721, 4.481689])
    a = normalised(weights_by_classifier(p[[0, 1, 3, 4]]))
    assert close(a, [0.128234, 0.348577, 0.947531, 2.575657])
    assert effective_size(a) == pytest.approx(2.086110, abs=1e-6)
    assert close(weights_by_classifier(torch.tensor([0.75]), zeros=100, ones=300), [1.0])


def test_a_mixture_moves_local_risks_to_the_global_one():  # D5
    q, c = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]).double(), torch.tensor([0.25, 0.75]).double()
    p, loss = c @ q, torch.tensor([1.0, 2.0, 3.0]).double()
    alpha = weights_by_density(p.log() - q.log(), centre=False)
    assert close(p, [0.25, 0.275, 0.475])
    assert close(alpha.flatten(), [0.357143, 1.375, 4.75, 2.5, 0.916667, 0.791667])
    assert close((q * alpha).sum(1), [1, 1])
    assert close(q @ loss, [1.4, 2.5])
    assert close((q * alpha) @ loss, [2.225, 2.225])
    assert float(c @ (q @ loss)) == pytest.approx(2.225)
    # Eq. 11 as printed leaves c out: its "densities" are K times too large, and E_q[alpha] = 1 refuses them.
    without = weights_by_density(q.sum(0).log() - q.log(), centre=False)
    assert close(without.flatten(), [1.142857, 2.5, 7, 8, 1.666667, 1.166667])
    assert close((q * without).sum(1), [2, 2])


def test_the_rules():  # D6
    p = torch.tensor([0.2, 0.5, 0.8])
    assert close(weights_by_classifier(p, "odds"), [0.25, 1, 4])
    assert close(normalised(weights_by_classifier(p, "odds")), [0.142857, 0.571429, 2.285714])
    assert close(weights_by_classifier(p, "minmax2"), [0, 0.4, 2])
    assert close(weights_by_classifier(p, "tri"), [0.4, 1, 0.4])
    assert close(weights_by_classifier(p, "prob"), [0.2, 0.5, 0.8])
    assert close(normalised(weights_by_classifier(torch.full((3,), 0.3), "minmax2")), [1, 1, 1])


def test_printed_odds_of_one_pixel_are_fedavg():  # D7
    local, everyone = 0.3, 0.6
    x = torch.tensor([1.0] * 30 + [0.0] * 70)
    truth = torch.tensor([everyone / local, (1 - everyone) / (1 - local)])
    assert close(truth, [2, 0.571429])
    assert float(torch.where(x == 1, *truth).mean()) == pytest.approx(1, abs=1e-6)
    u, v = (
        torch.full((100, 1), local),
        torch.full((100, 1), everyone),
    )  # what two MADEs of one pixel say, whatever it is
    rows = labelled(u, v)
    work = classify(Node("a", Data(rows, rows, rows)), rows, rows, u)
    fit, chance = next(work), None
    while chance is None:
        try:
            fit = work.send(run_one(fit).params)
        except StopIteration as end:
            chance = end.value
    assert close(normalised(weights_by_classifier(chance)), [1.0] * 100)
    assert close(
        weights_by_classifier(torch.zeros(2)), [0.01 / 0.99] * 2
    )  # a perfect judge: all fall to delta/(1 - delta)
    exact = weights_by_density(torch.where(x == 1, *truth.log()), centre=False)
    assert close(exact[[0, -1]], [2, 0.571429])


def test_ratio_of_a_known_density():  # D8
    ratio = weights_by_density(known_made()(every(3)).sum(1) - 3 * math.log(0.5), centre=False)
    expected = [0.724460, 1.255673, 0.426511, 1.194685, 0.203618, 1.160082, 0.213773, 2.821198]
    assert close(ratio, expected, 2e-6)
    assert float(ratio.mean()) == pytest.approx(1, abs=1e-6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from(RULES[2:]))
def test_weights_are_finite_and_have_mean_one(chances, rule):
    a = normalised(weights_by_classifier(torch.tensor(chances), rule))
    assert bool(torch.isfinite(a).all())
    assert float(a.mean()) == pytest.approx(1, abs=1e-5)
    assert 0 < effective_size(a) <= len(a) + 1e-6
