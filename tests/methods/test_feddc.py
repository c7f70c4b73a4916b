"""FedDC: drift and correction by hand, the doubled first move, and what is conserved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import hub, models, play

from kilter.core import Node, Params, Replies
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.feddc import FedDC
from kilter.params import add, buffers, mean, scale, sub, weights
from kilter.tasks import Task
from kilter.train import SGD, Adam
from small import constant, federation, linear_task, method, near, normed_task, same


def dc(task: Task | None = None, **settings: Any) -> FedDC:
    return FedDC(task=task or normed_task(), local=settings.pop("local", SGD(lr=0.1, batch=16)), **settings)


def w(*numbers: float) -> Params:
    return {"w": torch.tensor(numbers, dtype=torch.float32)}


def test_the_penalty_by_hand() -> None:
    run = dc(linear_task([0.0, 0.0]), a=0.01)
    theta = torch.tensor([1.0, 1.0], requires_grad=True)
    batch = constant([[0.0, 0.0]]).train.batch()
    anchor = sub(w(0.9, 1.2), w(0.1, -0.1))
    run.loss({"w": theta}, batch, (anchor, w(0, 0))).backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx([0.002, -0.003], abs=1e-7)


def test_drift_and_gradient_by_hand() -> None:
    """One step of 0.1 with gradient (-1, 2) from w = (.9, 1.2): theta = (1, 1), and h = (.1, -.1) + theta - w."""
    run = dc(linear_task([0.0, 0.0]), a=0.0, local=SGD(lr=0.1, batch=0))
    node = Node("a", constant([[-1.0, 2.0]]), round=1, state={"h": w(0.1, -0.1), "g": w(0, 0)})
    (theta, dg), _, _ = play(run.train(node, (w(0.9, 1.2), w(0, 0))))
    assert theta["w"].tolist() == pytest.approx([1, 1])
    assert node.state["h"]["w"].tolist() == pytest.approx([0.2, -0.3])
    assert node.state["g"]["w"].tolist() == pytest.approx([-1, 2])
    assert same(dg, node.state["g"])


def test_the_server_by_hand() -> None:
    """theta = (1, 1), (.8, 1.4); drifts after the round (.2, -.3), (0, .1): (1, 1.1)."""
    old = w(0.9, 1.2)
    before = mean([sub(w(0.2, -0.3), sub(w(1, 1), old)), sub(w(0, 0.1), sub(w(0.8, 1.4), old))])
    replies = Replies({"a": (w(1, 1), w(0, 0)), "b": (w(0.8, 1.4), w(0, 0))}, of=2)
    new, _, h = dc(linear_task([0.0, 0.0])).combine(hub(), (old, w(0, 0), before), replies)
    assert h["w"].tolist() == pytest.approx([0.1, -0.1])
    assert new["w"].tolist() == pytest.approx([1, 1.1])


def test_the_first_step_is_twice_that_of_the_plain_mean() -> None:
    """With a = 0 and all drifts zero; clients of equal size, so that the plain mean is FedAvg's."""
    clients = {"a": constant([[1.0, 0.0]] * 3), "b": constant([[0.0, -4.0]] * 3)}
    task, plan = linear_task([0.5, 0.5]), SGD(lr=0.1, batch=1)
    fedavg = models("fedavg", 1, clients, task=task, local=plan)
    actual = models("feddc", 1, clients, task=task, local=plan, a=0.0)
    start = task.init(0)
    assert near(actual, add(start, scale(sub(fedavg, start), 2)), 1e-6)


def test_the_server_knows_the_mean_drift_and_gradient_of_all_clients() -> None:
    """Though only some take part in a round, and only their models and changes are sent."""
    run = dc(cohort=0.5)
    with federation() as fed:
        result = federate(run, fed, 4)
        _, g, h = result.state
        zero = scale(g, 0)
        assert near(h, mean([fed.states.get(i, {}).get("h", zero) for i in fed.ids]), 1e-5)
        assert near(g, mean([fed.states.get(i, {}).get("g", zero) for i in fed.ids]), 1e-5)


def test_buffers_are_averaged_and_not_corrected() -> None:
    run = dc()
    with federation() as fed:
        result = federate(run, fed, 1)
        model, g, h = result.state
    assert not buffers(h)
    assert not buffers(g)
    assert all(float(v.min()) >= 0 for k, v in model.items() if k.endswith("running_var"))
    assert set(model) == set(run.task.init(0))
    assert set(h) == set(weights(model))


def test_the_gradient_estimate_is_right_with_momentum() -> None:
    run = dc(linear_task([0.0, 0.0]), a=0.0, local=SGD(lr=0.1, batch=1, momentum=0.9))
    node = Node("a", constant([[1.0, -2.0]] * 5), round=1)
    play(run.train(node, (w(0, 0), w(0, 0))))
    assert node.state["g"]["w"].tolist() == pytest.approx([1, -2], rel=1e-5)


def test_unsupported_topologies_and_optimisers_are_refused() -> None:
    with federation(topology="full") as fed, pytest.raises(Mistake, match="one aggregator"):
        federate(dc(), fed, 1)
    with federation() as fed, pytest.raises(Mistake, match="use SGD"):
        federate(dc(local=Adam()), fed, 1)


def test_traffic_is_twice_fedavg() -> None:
    bytes_ = []
    for name in ("fedavg", "feddc"):
        with federation() as fed:
            bytes_.append(federate(method(name), fed, 1).rounds[1])
    assert bytes_[1].bytes_up / bytes_[0].bytes_up == pytest.approx(2, rel=0.1)
    assert bytes_[1].bytes_down / bytes_[0].bytes_down == pytest.approx(2, rel=0.1)
