"""MOON: the contrast's known answers, and where it becomes FedAvg."""

from __future__ import annotations

from math import log, sqrt
from typing import Any

import pytest
import torch
from acting import is_fedavg, models, play
from torch import Tensor

from kilter.core import Node
from kilter.methods.moon import Moon
from kilter.tasks import augment
from kilter.train import SGD
from small import digits, mlp_task, near, normed_task, same, skewed


def moon(**settings: Any) -> Moon:
    return Moon(task=normed_task(), local=SGD(lr=0.1, batch=16), **settings)


def at(cosine: float) -> Tensor:
    """A vector at this cosine from (1, 0)."""
    return torch.tensor([[cosine, sqrt(1 - cosine**2)]]) * 3


Z = torch.tensor([[2.0, 0.0]])


@pytest.mark.parametrize(
    ("near", "far", "held", "expected"),
    [
        (0.9, [0.5], [True], 0.371101),
        (0.9, [0.9], [True], log(2)),
        (0.3, [0.5], [False], 0.0),  # nothing in the pool: -ln 1
        (0.9, [0.9, 0.9], [True, True], log(3)),
        (0.9, [0.5, -1.0], [True, False], 0.371101),  # what an empty place holds does not matter
    ],
)
def test_known_answers(near: float, far: list[float], held: list[bool], expected: float) -> None:
    run = moon(buffer=len(far))
    actual = run.contrast(Z, at(near), torch.stack([at(c)[0] for c in far])[None], torch.tensor(held))
    assert actual.item() == pytest.approx(expected, abs=1e-6)


def test_without_past_models_the_gradient_is_zero() -> None:
    z = Z.clone().requires_grad_()
    moon().contrast(z, at(0.3), torch.zeros(1, 1, 2), torch.tensor([False])).sum().backward()
    assert z.grad is not None
    assert z.grad.abs().max() == 0


def test_the_first_round_is_fedavg() -> None:
    assert is_fedavg("moon", rounds=1, mu=5.0, task=normed_task())
    assert not is_fedavg("moon", rounds=2, mu=5.0, task=normed_task())


def test_mu_zero_is_fedavg() -> None:
    assert is_fedavg("moon", rounds=3, mu=0.0, task=normed_task())


def test_past_models_are_fixed_and_replaced_in_order() -> None:
    run, node = moon(buffer=2), Node("c0", skewed()["c0"])
    w = run.task.init(0)
    for round in (1, 2, 3):
        node.round = round
        (w, _), (fit,), (after,) = play(run.train(node, w))
        held, others = fit.ctx
        assert held.tolist() == [round > 1, round > 2]
        assert not others  # images are as they are, so features come with the rows
        assert not fit.rows["near"].requires_grad
        assert not fit.rows["far"].requires_grad
        assert same(node.state["past"][-1], after)
        assert len(node.state["past"]) == min(round, 2)


def test_augmented_images_are_compared_as_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss on images that an augmentation doubles is the loss on doubled images."""
    monkeypatch.setitem(augment.IMAGES, "flip", lambda x: x * 2)
    network = mlp_task()
    doubling = Moon(task=mlp_task(augment="flip"), local=SGD(), mu=5.0)
    plain = Moon(task=network, local=SGD(), mu=5.0)
    w, common, past = (network.init(seed) for seed in range(3))
    rows, held = digits().take(torch.arange(20)).batch(torch.arange(20)), torch.tensor([True])
    twice = rows | {"x": rows["x"] * 2}
    near, far = (network.features(p, twice["x"]) for p in (common, past))
    expected = plain.loss(w, twice | {"near": near, "far": far[:, None]}, (held, []))
    assert torch.allclose(doubling.loss(w, rows, (held, [common, past])), expected)
    assert not torch.allclose(plain.loss(w, rows | {"near": near, "far": far[:, None]}, (held, [])), expected)


def test_the_received_model_is_not_modified() -> None:
    run, node = moon(), Node("c0", skewed()["c0"], round=1)
    w = run.task.init(0)
    before = {k: v.clone() for k, v in w.items()}
    run.represent(w, node)
    assert same(w, before)  # evaluation mode: BatchNorm's statistics do not move


def test_past_models_stay_at_the_node() -> None:
    """One node alone receives its own last model: both cosines are one number, and the contrast pulls nowhere."""
    data = {"a": skewed()["c0"]}
    actual, plain = (models(name, 4, data, **more) for name, more in (("moon", {"mu": 5.0}), ("fedavg", {})))
    assert near(actual, plain, 1e-6)
    assert not near(models("moon", 4, mu=5.0), models("fedavg", 4), 1e-3)  # with others it does
