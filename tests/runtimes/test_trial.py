"""The trial before a run: no false alarms, and no effect on the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kilter import SGD, Mistake, Task
from kilter.core import Data, Rows
from kilter.methods import methods
from kilter.runtimes.trial import smallest_batch, try_method, try_model
from small import mlp_task


def rows(n: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows.of(x=torch.rand(n, 1, 8, 8, generator=generator), y=torch.arange(n) % 10)


CLIENTS = {f"c{k}": Data(rows(40, k), rows(10, k), rows(10, k)) for k in range(4)}
PLAN = SGD(lr=0.1, batch=16)


@pytest.mark.parametrize("name", methods())
def test_every_built_in_method_passes(name: str) -> None:
    before = torch.random.get_rng_state()
    method = methods()[name](task=mlp_task(), local=PLAN)
    params = {k: v.clone() for k, v in method.task.init(0).items()}
    try_method(method, name, CLIENTS, rows(20))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(v, method.task.init(0)[k]) for k, v in params.items())


def test_a_model_passes_or_is_refused() -> None:
    try_model(mlp_task(), "mlp", CLIENTS, PLAN, 10)
    with pytest.raises(Mistake, match="must return"):
        try_model(mlp_task(), "mlp", CLIENTS, PLAN, 11)


def test_the_smallest_batch_is_the_one_that_is_tried() -> None:
    one = {**CLIENTS, "c9": Data(rows(1), rows(1), rows(1))}
    assert smallest_batch(CLIENTS, PLAN) == ("c0", 8)
    assert smallest_batch(one, PLAN) == ("c9", 1)
    assert smallest_batch(CLIENTS, SGD(batch=0)) == ("c0", 32)
    normed = Task(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)))
    try_model(normed, "normed", CLIENTS, PLAN, 10)
    with pytest.raises(Mistake, match="BatchNorm cannot train on a batch of one row, such as one of client 'c9'"):
        try_model(normed, "normed", one, PLAN, 10)


def test_a_missing_public_set_is_named() -> None:
    method = methods()["fedmd"](task=mlp_task(), local=PLAN)
    with pytest.raises(Mistake, match="public"):
        try_method(method, "fedmd", CLIENTS, None)
