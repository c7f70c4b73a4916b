"""Posteriors over models: known answers of METHODS 4.4, moments, the hull, BatchNorm; ensembles and their files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import update_bn

from kilter.blocks import ensemble
from kilter.blocks.posterior import (
    Moments,
    deviation_of,
    dirichlet,
    gaussian,
    inputs,
    learning_rate,
    mixture,
    refresh_batchnorm,
    reweighted,
    sharpen,
    unit_deviation,
)
from kilter.core import Rows
from kilter.params import average, buffers, weights
from kilter.tasks import Task
from small import bench, digits, method, near, normed_task, same

THREE = [{"w": torch.tensor(v)} for v in ([1.0, 2.0], [3.0, 0.0], [5.0, 4.0])]
SIZES = [100, 300, 600]


def close(actual: object, wanted: object, within: float = 1e-6) -> None:
    assert torch.as_tensor(actual, dtype=torch.float64).numpy() == pytest.approx(np.asarray(wanted), abs=within)


def test_b1_gaussian_over_clients() -> None:
    mean = average(zip(THREE, SIZES, strict=True))
    close(mean["w"], [4, 2.6])
    deviation = deviation_of(mean, THREE, SIZES, None, 0)
    close(deviation["w"] ** 2, [1.8, 3.24])
    close(deviation["w"], [1.341641, 1.8])
    equal = deviation_of(average((w, 1) for w in THREE), THREE, [1, 1, 1], None, 0)
    close(equal["w"] ** 2, [2.666667, 2.666667])


def test_b1_samples_are_mean_plus_deviation_times_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = {"w": torch.tensor([4.0, 2.6])}
    deviation = {"w": torch.tensor([1.341641, 1.8])}
    for eps, wanted in (([1.0, -1.0], [5.341641, 0.8]), ([0.0, 0.5], [4.0, 3.5])):
        monkeypatch.setattr(torch, "randn", lambda *_, eps=eps, **__: torch.tensor(eps))
        close(gaussian(mean, deviation, torch.Generator())["w"], wanted)


def test_b2_dirichlet_weights() -> None:
    omega = reweighted([0.2, 0.3, 0.5], SIZES)
    close(omega, [0.048780, 0.219512, 0.731707])
    assert sum(omega) == pytest.approx(1, abs=1e-12)
    close(mixture(THREE, omega)["w"], [4.365854, 3.024390])


@pytest.mark.parametrize(
    ("gamma", "variance", "covariance"), [(0.5, 0.0625, -0.020833), (1, 0.0375, -0.0125), (2, 0.020833, -0.006944)]
)
def test_b3_moments_of_the_dirichlet(gamma: float, variance: float, covariance: float) -> None:
    shares = np.array(dirichlet([1] * 4, gamma, False, 30_000, np.random.default_rng(0)))
    close(shares.var(0), [variance] * 4, 1e-3)
    close(np.cov(shares.T)[0, 1], covariance, 1e-3)
    theta = shares @ np.array([1, 3, 5, 7])  # of models 1, 3, 5, 7: population variance 5
    assert theta.mean() == pytest.approx(4, abs=0.03)
    assert theta.var() == pytest.approx(5 / (4 * gamma + 1), rel=0.03)


def test_b3_moments_of_the_gaussian() -> None:
    clients = [{"w": torch.full((100_000,), v)} for v in (1.0, 3.0, 5.0, 7.0)]
    mean = average((w, 1) for w in clients)
    drawn = gaussian(mean, deviation_of(mean, clients, [1] * 4, None, 0), torch.Generator().manual_seed(0))["w"]
    assert float(drawn.mean()) == pytest.approx(4, abs=0.03)
    assert float(drawn.var()) == pytest.approx(5, rel=0.03)


def test_only_size_concentration_has_the_mean_of_fedavg() -> None:
    pi = np.array(SIZES) / 1000
    rng = np.random.default_rng(0)
    close(np.mean(dirichlet(SIZES, 1, True, 30_000, rng), 0), pi, 5e-3)
    close(np.mean(dirichlet(SIZES, 1, False, 30_000, rng), 0), [0.136, 0.328, 0.536], 5e-3)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0.05, 1, 20]), st.booleans())
def test_mixtures_lie_in_the_hull_of_the_clients(seed: int, clients: int, gamma: float, by_size: bool) -> None:
    rng = np.random.default_rng(seed)
    models = [{"w": torch.tensor(rng.normal(size=5))} for _ in range(clients)]
    stack = torch.stack([m["w"] for m in models])
    for shares in dirichlet(rng.integers(1, 1000, clients).tolist(), gamma, by_size, 3, rng):
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        actual = mixture(models, shares)["w"]
        assert bool(((actual >= stack.amin(0) - 1e-12) & (actual <= stack.amax(0) + 1e-12)).all())


def test_b4_probabilities_are_averaged_and_sharpened() -> None:
    logits = [[2.0, 0, 0], [0, 1.5, 0], [0, 1.2, 0.1]]
    task = Task(nn.Linear(1, 3))
    models = [{"weight": torch.zeros(3, 1), "bias": torch.tensor(v)} for v in logits]
    actual = ensemble.probabilities(task, ensemble.ensemble(models[0], models[1:]), Rows.of(x=torch.zeros(2, 1)))
    close(actual, [[0.375196, 0.469972, 0.154832]] * 2)
    close(sharpen(actual, 0.5)[0], [0.365055, 0.572777, 0.062167])
    close(sharpen(torch.tensor([0.5, 0.3, 0.2]), 0.5), [0.657895, 0.236842, 0.105263])


def test_b5_learning_rates() -> None:
    rounds = (0, 1, 30, 31, 60, 61, 90, 91, 99)
    wanted = [0.005, 0.01, 0.01, 0.002, 0.002, 0.001, 0.001, 0.0001, 0.0001]
    close([learning_rate("fedbe", 0.01, r, 100) for r in rounds], wanted, 1e-12)
    literal = [learning_rate("literal", 0.01, r, 100) for r in (0, 29, 30, 60, 90, 99)]
    close(literal, [0.01, 0.01, 0.009, 0.006, 0.003, 0.003], 1e-12)
    assert {learning_rate("constant", 0.01, r, 100) for r in range(100)} == {0.01}


def test_b6_moments_of_a_path() -> None:
    path = Moments(squares=True)
    for w in (1.0, 2.0, 4.0):
        path.add({"w": torch.tensor(w), "~bn.n": torch.tensor(int(w))})
    close(path.mean["w"], 2.333333)
    variance = path.variance()
    assert variance is not None
    assert variance.keys() == {"w"}
    close(variance["w"], 1.555556)
    assert int(path.mean["~bn.n"]) == 1
    assert Moments().variance() is None


def test_b8_spread_within_clients_counts_by_kappa() -> None:
    mean = average(zip(THREE, SIZES, strict=True))
    within = [{"w": torch.tensor(v)} for v in ([0.5, 0.2], [0.4, 0.4], [0.1, 0.3])]
    close(deviation_of(mean, THREE, SIZES, within, 1)["w"] ** 2, [2.03, 3.56])


def test_identical_clients_have_no_spread() -> None:
    same_models = [THREE[0]] * 3
    mean = average(zip(same_models, SIZES, strict=True))
    drawn = gaussian(mean, deviation_of(mean, same_models, SIZES, None, 0), torch.Generator())
    assert same(drawn, THREE[0])


def test_spread_of_unit_steps() -> None:
    """By hand: steps (1, 0) and (0, 3) from 0 have mean length 2, unit steps the mean (.5, .5) and the deviation .5."""
    clients = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 3.0])}]
    centre, deviation = unit_deviation({"w": torch.zeros(2), "~n": torch.tensor(1)}, clients)
    close(centre["w"], [1, 1])
    close(deviation["w"], [1, 1])
    assert centre.keys() == {"w"}


# BatchNorm ----------------------------------------------------------------------------------------------------------


def test_batchnorm_statistics_agree_with_torch_without_dropout() -> None:
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10)))
    w = task.init(0)
    actual = refresh_batchnorm(task, w, bench())
    net = task.load(w)
    update_bn(list(inputs(bench())), net)
    assert near(actual, {ours: net.state_dict()[name] for name, ours in task.names.items()})
    assert same(weights(actual), weights(w))


def test_batchnorm_statistics_do_not_depend_on_dropout_or_old_values() -> None:
    task = normed_task()  # with dropout
    w = task.init(0)
    torch.manual_seed(1)
    first = refresh_batchnorm(task, w, bench())
    worse = w | {k: v + 5 for k, v in buffers(w).items()}
    assert same(refresh_batchnorm(task, worse, bench()), first)
    assert refresh_batchnorm(task, w, bench().take(torch.arange(1))) is w  # one row has no variance
    assert refresh_batchnorm(method("fedavg").task, w, bench()) is w


def test_batches_are_even() -> None:
    assert [len(x) for x in inputs(digits().take(torch.arange(251)))] == [126, 125]
