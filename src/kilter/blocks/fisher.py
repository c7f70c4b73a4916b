"""The diagonal of the Fisher information, from the gradient of each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from kilter.core import Params, Rows
from kilter.params import buffers, count, weights, zeros
from kilter.tasks import Task

HELD = 2**24  # numbers in the gradients that are in memory at once


def fisher(task: Task, params: Params, rows: Rows) -> Params:
    """I = (1/n) sum_i (d loss_i / d theta)^2 over these rows, in evaluation mode, for each weight.

    This is the mean of squares, not the square of the mean: gradients of different rows must not cancel.
    """
    theta, rest = weights(params), buffers(params)

    def loss(theta: Params, x: Tensor, y: Tensor) -> Tensor:
        return task.rows_loss(task.outputs(theta | rest, x[None]), y[None])[0]

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    total = zeros(theta)
    for at in torch.arange(len(rows)).split(max(1, HELD // count(theta))):
        batch = rows.batch(at)
        for name, g in each(theta, batch["x"], batch["y"]).items():
            total[name] += g.square().sum(0)
    return {name: t / len(rows) for name, t in total.items()}
