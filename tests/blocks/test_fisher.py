"""Fisher information: the mean over rows of squared gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilter.blocks.fisher
from kilter.blocks.fisher import fisher
from kilter.core import Params
from kilter.params import weights
from small import constant, linear_task, mlp_task, near, normed_task, skewed


def w(*numbers: float) -> Params:
    return {"w": torch.tensor(numbers, dtype=torch.float32)}


def test_it_is_a_mean_of_squares_not_the_square_of_a_mean() -> None:
    actual = fisher(linear_task([0.0]), w(0.0), constant([[1.0], [-1.0], [2.0]]).train)
    assert actual["w"].item() == pytest.approx(2.0)  # (mean 2/3)^2 = .444444 would be wrong


def test_the_size_of_the_parts_does_not_matter(monkeypatch: Any) -> None:
    task, rows = mlp_task(), skewed()["c0"].train
    whole = fisher(task, task.init(0), rows)
    monkeypatch.setattr(kilter.blocks.fisher, "HELD", 3 * task.size())
    assert near(fisher(task, task.init(0), rows), whole, 1e-6)


def test_it_agrees_with_one_row_at_a_time() -> None:
    task, rows = normed_task(), skewed()["c0"].train
    params = {k: v.requires_grad_() if k in weights(task.init(0)) else v for k, v in task.init(0).items()}
    leaves = weights(params)
    total = {k: torch.zeros_like(v) for k, v in leaves.items()}
    for i in range(len(rows)):
        batch = rows.batch(torch.tensor([i]))
        loss = task.rows_loss(task.outputs(params, batch["x"]), batch["y"])[0]
        for k, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[k] += g**2 / len(rows)
    actual = fisher(task, task.init(0), rows)
    assert set(actual) == set(leaves)  # weights only: BatchNorm's buffers have no curvature
    assert near(actual, total, 1e-5)
