"""Label skew from what clients send alone, and its noise."""

from __future__ import annotations

import random
from math import exp

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kilter.cli import app
from kilter.data import load, split
from kilter.data.skew import counts, measure
from kilter.errors import Mistake
from kilter.report.federated_skew import census, with_noise


@pytest.fixture(scope="module")
def digits():
    return split(load("digits"), "dirichlet:0.3", clients=5)


def test_the_same_skew_as_with_all_labels_at_hand(digits):
    skew, table, spent = census(digits)
    whole = measure(digits)
    assert (table == counts(digits)).all()
    assert skew.clients == whole.clients
    assert (skew.kl, skew.js_weighted, skew.gini) == (whole.kl, whole.js_weighted, whole.gini)
    assert skew.feature is None  # features are not asked for
    assert 0 < spent < 5 * 1000


def test_noise_is_laplace_of_scale_one_over_epsilon():
    chance = random.Random(0)
    noise = (with_noise(torch.full((20_000,), 1000), 0.5, chance) - 1000).numpy()
    assert abs(noise.mean()) < 0.1
    assert np.abs(noise).mean() == pytest.approx(2, rel=0.03)
    assert (np.abs(noise) > 4.5).mean() == pytest.approx(exp(-4.5 / 2), rel=0.05)


def test_noisy_counts_are_counts():
    noisy = with_noise(torch.tensor([0, 0, 0, 3] * 100), 0.2, random.Random(1))
    assert noisy.dtype == torch.int64
    assert int(noisy.min()) == 0


def test_noise_cannot_be_foretold_from_the_seed(digits):
    assert (census(digits, 0.1)[1] != census(digits, 0.1)[1]).any()


def test_skew_of_noisy_counts_is_near(digits):
    assert census(digits, epsilon=50)[0].kl == pytest.approx(measure(digits).kl, abs=0.05)


@pytest.mark.parametrize("epsilon", [-1, float("nan"), float("inf")])
def test_epsilon_must_make_sense(digits, epsilon):
    with pytest.raises(Mistake, match="epsilon"):
        census(digits, epsilon)


def test_show_federated(tmp_path):
    arguments = ["show", "--data", "digits", "--clients", "4", "--picture", str(tmp_path / "p.png"), "--federated"]
    plain = CliRunner().invoke(app, arguments)
    assert plain.exit_code == 0
    assert "no label left a client" in " ".join(plain.output.split())
    assert "epsilon" not in plain.output
    noisy = CliRunner().invoke(app, [*arguments, "--epsilon", "0.5"])
    assert "epsilon = 0.5" in " ".join(noisy.output.split())
    assert (tmp_path / "p.png").exists()


def test_show_epsilon_needs_federated():
    assert isinstance(CliRunner().invoke(app, ["show", "--epsilon", "1"]).exception, Mistake)
