"""FedAvg: known answers and laws."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from acting import FULL, run, together
from torch import nn

from kilter.train import SGD
from small import (
    bench,
    constant,
    linear_task,
    mlp_task,
    near,
    skewed,
)


def test_one_full_batch_is_a_centralised_gradient_step() -> None:
    clients = skewed()
    task = mlp_task()
    actual = run("fedavg", clients, task=task, local=FULL).model
    rows = together(clients)
    net = task.load(task.init(0)).train()
    nn.functional.cross_entropy(net(rows["x"]), rows["y"]).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad
    assert actual is not None
    assert near(actual, dict(net.state_dict()))
    assert not near(actual, task.init(0), 1e-4)


def test_models_are_weighted_by_the_rows_of_the_participants() -> None:
    clients = {f"c{k}": constant([[g]] * n) for k, (g, n) in enumerate([(1.0, 1), (2.0, 3), (50.0, 4), (9.0, 2)])}
    sizes = {i: len(d.train) for i, d in clients.items()}
    gradient = {"c0": 1.0, "c1": 2.0, "c2": 50.0, "c3": 9.0}
    actual = run("fedavg", clients, 3, linear_task([0.0]), local=SGD(lr=1.0, batch=0), cohort=0.5)
    w = 0.0
    for record in actual.rounds[1:]:
        there = record.participants
        assert len(there) == 2
        w -= sum(gradient[i] * sizes[i] for i in there) / sum(sizes[i] for i in there)
    assert actual.state["w"].item() == pytest.approx(w, rel=1e-5)


@pytest.mark.parametrize(("weigh", "step"), [("rows", 1.75), ("equal", 1.5)])
def test_models_can_count_equally(weigh: str, step: float) -> None:
    clients = {"a": constant([[1.0]]), "b": constant([[2.0]] * 3)}
    actual = run("fedavg", clients, 1, linear_task([0.0]), local=SGD(lr=1.0, batch=0), weigh=weigh)
    assert actual.state["w"].item() == pytest.approx(-step, rel=1e-6)


def test_learning_happens() -> None:
    actual = run("fedavg", skewed(rows=800), 10, local=SGD(lr=0.2, batch=16), bench=bench())
    losses = [r.loss for r in actual.rounds[1:]]
    assert losses[-1] < losses[0] / 2
    assert actual.summary.global_accuracy > 0.75
    assert all(a != b for a, b in pairwise(losses))
