"""Pooled: centralised training on the union of all rows."""

from __future__ import annotations

import torch
from acting import run, together
from torch import nn

from kilter.federate import federate
from kilter.train import SGD
from small import (
    bench,
    federation,
    method,
    mlp_task,
    same,
    skewed,
)


def test_it_is_centralised_training_on_the_union() -> None:
    clients = skewed()
    task = mlp_task()
    plan = SGD(lr=0.1, batch=0, epochs=3)
    actual = run("pooled", clients, 2, task, local=plan).model
    rows = together(clients)
    net = task.load(task.init(0)).train()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        optim.zero_grad()
        nn.functional.cross_entropy(net(rows["x"]), rows["y"]).backward()
        optim.step()
    assert actual is not None
    assert same(actual, dict(net.state_dict()))


def test_every_row_of_every_client_is_used() -> None:
    with federation(skewed()) as fed:
        federate(method("pooled"), fed, 1)
        assert len(fed.states["server"]["rows"]["y"]) == sum(len(d.train) for d in fed.clients.values())


def test_it_is_better_than_solo() -> None:
    clients = skewed(rows=800)
    plan = SGD(lr=0.2, batch=16)
    best, alone = (run(n, clients, 8, local=plan, bench=bench()).summary.global_accuracy for n in ("pooled", "solo"))
    assert best > alone + 0.1
