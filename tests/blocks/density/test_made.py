"""MADE: its masks, its normalisation, what it learns, and that it trains as any network does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter import SGD, Adam, Fit, Rows, Simulation, federate
from kilter.blocks.density.made import MADE, density_task, made_with
from kilter.blocks.density.ratio import loss_of
from kilter.fast.fits import run
from kilter.methods.fedavg import FedAvg
from kilter.params import weights
from kilter.seeds import generator
from kilter.train import run_one
from small import every, near, table
from small import known_made as known


def test_masks_of_known_degrees():  # D3
    made = MADE(4, degrees=(1, 2, 3, 2))
    assert made.sees_mask.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
    assert made.says_mask.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]
    assert (made.says_mask @ made.sees_mask).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [3, 2, 0, 0], [4, 3, 1, 0]]


def test_known_probabilities():  # D3b
    x = every(3)
    p = known()(x).sum(1).exp().detach()
    expected = [0.090558, 0.156959, 0.053314, 0.149336, 0.025452, 0.145010, 0.026722, 0.352650]
    assert p.tolist() == pytest.approx(expected, abs=1e-6)
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    u = known().means(x)
    assert u[-1].tolist() == pytest.approx([0.549834, 0.689974, 0.929563], abs=1e-6)
    assert torch.equal(u[:, 0], u[:1, 0].expand(8))


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**31))
def test_bernoulli_sums_to_one_over_all_inputs(inputs, hidden, seed):
    torch.manual_seed(seed)
    made = MADE(inputs, hidden, seed=seed).double()
    with torch.no_grad():
        for w in made.parameters():
            w.mul_(3)
        total = made(every(inputs).double()).sum(1).exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
@given(st.integers(1, 9), st.integers(0, 2**31))
def test_an_output_depends_only_on_earlier_inputs(kind, inputs, seed):
    made = MADE(inputs, 16, kind, seed)
    jacobian = torch.autograd.functional.jacobian(lambda x: made.outputs(x[None])[0], torch.rand(inputs))
    for head in jacobian.split(inputs):
        assert torch.equal(head, head.tril(-1))


def test_degrees_follow_from_the_seed_and_are_in_range():
    one, same, other = MADE(9, 50, seed=1), MADE(9, 50, seed=1), MADE(9, 50, seed=2)
    assert torch.equal(one.sees_mask, same.sees_mask)
    assert not torch.equal(one.sees_mask, other.sees_mask)
    degrees = one.sees_mask.sum(1)
    assert degrees.min() >= 1
    assert degrees.max() <= 8
    assert sorted(one.state_dict()) == ["says.bias", "says.weight", "sees.bias", "sees.weight"]  # masks are not sent


def test_gaussian_density_integrates_to_one():
    made = MADE(1, 4, "gaussian").double()
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)[:, None]
    assert float(torch.trapezoid(made(x)[:, 0].exp().detach(), x[:, 0])) == pytest.approx(1, abs=1e-6)


def test_samples_follow_the_density():
    x = known().sample(20_000, generator(0))
    actual = torch.bincount((x @ torch.tensor([4.0, 2.0, 1.0])).long(), minlength=8) / len(x)
    assert torch.allclose(actual, known()(every(3)).sum(1).exp(), atol=0.012)
    assert torch.equal(x, known().sample(20_000, generator(0)))
    assert known().sample(0, generator(0)).shape == (0, 3)


def test_gaussian_samples_follow_the_density():
    made = MADE(2, 8, "gaussian", seed=3)
    x = made.sample(20_000, generator(1))
    # E[-ln p] of one's own samples is the entropy: sum of (1 + ln 2 pi + s)/2, s the log-variances there
    entropy = (1 + math.log(2 * math.pi) + made.outputs(x).chunk(2, 1)[1]).sum(1).mean() / 2
    assert (-made(x).sum(1).mean()).item() == pytest.approx(entropy.item(), abs=0.03)


def correlated(kind: str, rows: int = 400, seed: int = 0) -> torch.Tensor:
    """Three features: the second repeats the first, mostly; the third is constant."""
    g = generator(seed, kind)
    if kind == "bernoulli":
        a = (torch.rand(rows, generator=g) < 0.5).float()
        b = torch.where(torch.rand(rows, generator=g) < 0.9, a, 1 - a)
    else:
        a = torch.randn(rows, generator=g)
        b = a + 0.3 * torch.randn(rows, generator=g)
    return torch.stack([a, b, torch.zeros(rows)], 1)


def fit_of(kind: str, client: int, epochs: int) -> Fit:
    """One client's ordinary request to train; clients have different numbers of rows."""
    task, x = density_task(3, 32, kind, 0), correlated(kind, 400 - client, client)
    plan = Adam(lr=0.02, epochs=epochs, batch=50)
    return Fit(loss_of(task), task.init(0), Rows.of(x=x, y=torch.zeros(len(x))), plan, client)


@pytest.mark.parametrize(
    ("kind", "best"),  # entropy: ln 2 + H(.9) + 0; h(1) + h(.3) + the narrowest Gaussian at its centre
    [("bernoulli", 1.018), ("gaussian", 1.419 + 0.215 + 0.919 - 2.303)],
)
def test_dependencies_between_inputs_are_learned(kind, best):
    task = density_task(3, 32, kind, 0)
    made = made_with(task, run_one(fit_of(kind, 0, epochs=40)).params)
    fresh = correlated(kind, 2000, 9)
    assert float(-made(fresh).sum(1).detach().mean()) == pytest.approx(best, abs=0.15)
    assert float(torch.corrcoef(made.sample(2000, generator(5))[:, :2].T)[0, 1]) > 0.7


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_stacked_training_agrees_with_single_training(kind):
    fits = [fit_of(kind, k, epochs=2) for k in range(3)]
    for a, b in zip(run(fits), run(fits, stacked=False), strict=True):
        assert near(a.params, b.params, 1e-4)
        assert a.loss == pytest.approx(b.loss, abs=1e-4)


def test_any_method_can_train_one():
    x = correlated("bernoulli")
    task = density_task(3, 8, "bernoulli", 0)
    clients = {
        f"c{k}": table(x=part, y=torch.zeros(len(part), dtype=torch.int64)) for k, part in enumerate(x.split(100))
    }
    with Simulation(clients, bench=Rows.of(x=x, y=torch.zeros(400))) as fed:
        result = federate(FedAvg(task=task, local=SGD(lr=0.3, epochs=3)), fed, 8)
    assert result.summary.last.scores.metrics["loss"] < 3 * math.log(2) - 0.7
    assert weights(result.state).keys() == result.state.keys()


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_deep_models_with_several_orderings_depend_only_on_earlier_inputs_and_each_ordering_sums_to_one(
    d, layers, orderings, seed
):
    torch.manual_seed(seed)
    made = MADE(d, 7, seed=seed, layers=layers, orderings=orderings).double()
    x = every(d).double()
    with torch.no_grad():
        for at in range(orderings):
            assert float(made.log_density(x, made.outputs(x, at)).sum(1).exp().sum()) == pytest.approx(1, abs=1e-9)
    jacobian = torch.autograd.functional.jacobian(lambda v: made.outputs(v[None])[0], torch.rand(d).double())
    assert bool((jacobian.triu() == 0).all())


def test_samples_of_a_deep_model_follow_its_density():
    torch.manual_seed(0)
    made = MADE(3, 12, layers=2)
    drawn = made.sample(20_000, generator(0, "samples"))
    index = (drawn @ torch.tensor([4.0, 2.0, 1.0])).long()
    share = torch.bincount(index, minlength=8) / len(drawn)
    assert torch.allclose(share, made(every(3)).sum(1).exp().detach(), atol=0.02)
