"""Distributions over models: moments of a path of weights (SWA), Gaussian and Dirichlet posteriors, learning rates by round.

Only weights are sampled. BatchNorm's statistics are averaged like weights, and then recomputed (`refresh_batchnorm`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from kilter.core import Fit, Loss, Node, Params, Rows
from kilter.params import apply, average, scale, weights, zeros
from kilter.tasks import EVAL_BATCH, Task
from kilter.train import Plan

LEAST = 1e-30  # smallest variance
Schedule = Literal["fedbe", "literal", "constant"]
FEDBE = ((3, 0.2), (6, 0.1), (9, 0.01))  # (tenths of the rounds, factor)
LITERAL = ((3, 0.9), (6, 0.6), (9, 0.3))

# Paths of weights ---------------------------------------------------------------------------------------------------


class Moments:
    """Running mean and variance of models: mean <- (c mean + w)/(c + 1), and likewise the squares. Holds two models.

    >>> path = Moments(squares=True)
    >>> for w in (1.0, 2.0, 4.0):
    ...     path.add({"w": torch.tensor([w])})
    >>> path.mean, path.variance()
    ({'w': tensor([2.3333])}, {'w': tensor([1.5556])})
    """

    def __init__(self, squares: bool = False) -> None:
        self.count = 0
        self.mean: Params = {}
        self._squares: Params | None = {} if squares else None  # sum of (w - mean)^2

    def add(self, w: Params) -> None:
        self.count += 1
        if self.count == 1:
            self.mean = {k: v.clone() for k, v in w.items()}
            self._squares = zeros(weights(w)) if self._squares is not None else None
            return
        for k, mean in self.mean.items():
            if mean.is_floating_point():  # integer counters stay those of the first model
                away = w[k] - mean
                mean.lerp_(w[k], 1 / self.count)
                if self._squares is not None and k in self._squares:
                    self._squares[k].addcmul_(away, w[k] - mean)

    def variance(self) -> Params | None:
        """The variance of the weights; None without `squares`."""
        return None if self._squares is None else scale(self._squares, 1 / self.count)


def swa(
    node: Node,
    loss: Loss,
    w: Params,
    plan: Plan,
    start: float,
    squares: bool = False,
    rows: Rows | None = None,
    cycle: int = 1,
    **columns: Tensor,
) -> Generator[Fit, Params, tuple[Params, Params | None, int]]:
    """Stochastic weight averaging. Returns the mean, the variance and the number of the models that were averaged.

    Training runs for the share `start` of the epochs without averaging, and then averages the model after each epoch. Each of
    these epochs is a fit of its own, so momentum restarts in each. `start` >= 1 is one plain fit. With `cycle` > 1, the learning
    rate falls linearly over each cycle of that many epochs, and only the model at the end of a cycle is averaged.
    """
    rows = node.data.train if rows is None else rows
    before = min(int(start * plan.epochs), plan.epochs)
    path = Moments(squares)
    if before:
        w = yield node.fit(loss, w, replace(plan, epochs=before), rows=rows, **columns)
    if before == plan.epochs:
        path.add(w)
    for epoch in range(plan.epochs - before):
        rate = plan.lr * (1 - epoch % cycle / cycle)
        w = yield node.fit(loss, w, replace(plan, epochs=1, lr=rate), rows=rows, **columns)
        if (epoch + 1) % cycle == 0 or (epoch + 1 == plan.epochs - before and not path.count):
            path.add(w)
    return path.mean, path.variance(), path.count


def snapshots(epochs: int, start: float, cycle: int = 1) -> int:
    """How many models `swa` averages.

    >>> snapshots(3, 0.5), snapshots(3, 1.0), snapshots(7, 0.0, cycle=3)
    (2, 1, 2)
    """
    return max(1, (epochs - min(int(start * epochs), epochs)) // cycle)


def inputs(rows: Rows) -> Iterator[Tensor]:
    """The column x in batches of nearly equal size."""
    for at in torch.arange(len(rows)).tensor_split(-(-len(rows) // EVAL_BATCH)):
        yield rows.batch(at)["x"]


@torch.no_grad()
def refresh_batchnorm(task: Task, w: Params, rows: Rows) -> Params:
    """Recompute BatchNorm's statistics on these rows: the mean over batches, without dropout.

    The same as torch.optim.swa_utils.update_bn (a test compares them), except that update_bn leaves dropout on.
    """
    net = task.load(w)
    layers = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers or len(rows) < 2:
        return w
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # use the plain mean over batches
        layer.train()
    for x in inputs(rows):
        net(task.standard(x))
    return w | {task.names[k]: v.clone() for k, v in net.named_buffers() if k in task.names}


# Posteriors over clients --------------------------------------------------------------------------------------------


def deviation_of(
    mean: Params, clients: Sequence[Params], sizes: Sequence[float], within: Sequence[Params] | None, kappa: float
) -> Params:
    """Standard deviation of the weights over clients, by the law of total variance.

    Sigma = sum_i pi_i [(theta_i - mean)^2 + kappa s2_i] with pi_i = |D_i| / sum |D|.
    """
    total = zeros(weights(mean))
    for i, (theta, size) in enumerate(zip(clients, sizes, strict=True)):
        pi = size / sum(sizes)
        for k, sum_ in total.items():
            away = theta[k] - mean[k]
            sum_.addcmul_(away, away, value=pi)
            if within is not None:
                sum_.add_(within[i][k], alpha=pi * kappa)
    return apply(lambda v: v.clamp_(min=LEAST).sqrt_(), total)


def unit_deviation(base: Params, clients: Sequence[Params]) -> tuple[Params, Params]:
    """Centre and deviation as in FedBE's code, tensor by tensor, from the clients' updates d_i scaled to unit length.

    u_i = d_i / |d_i|; centre = base + L mean(u), deviation = L sqrt(max(var(u), 1e-5)), L = mean |d_i|. Client sizes are ignored.
    """
    centre, deviation = {}, {}
    for k, start in weights(base).items():
        steps = torch.stack([theta[k] - start for theta in clients])
        lengths = steps.flatten(1).norm(dim=1).clamp(min=LEAST)
        units = steps / lengths.reshape(-1, *[1] * start.dim())
        centre[k] = start + lengths.mean() * units.mean(0)
        deviation[k] = lengths.mean() * units.var(0, correction=0).clamp(min=1e-5).sqrt()
    return centre, deviation


def gaussian(centre: Params, deviation: Params, rng: torch.Generator) -> Params:
    """One sample: centre + deviation eps for weights. Buffers are those of the centre."""
    return centre | apply(lambda s, m: torch.randn(m.shape, generator=rng).mul_(s).add_(m), deviation, centre)


def reweighted(g: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """omega_i = g_i |D_i| / sum_j g_j |D_j|.

    >>> [round(o, 6) for o in reweighted([0.2, 0.3, 0.5], [100, 300, 600])]
    [0.04878, 0.219512, 0.731707]
    """
    total = sum(a * n for a, n in zip(g, sizes, strict=True))
    return [a * n / total for a, n in zip(g, sizes, strict=True)]


def printed_shares(sizes: Sequence[float], gamma: float, samples: int, rng: np.random.Generator) -> list[list[float]]:
    """FEDSBME's Eq. 4-5 as printed: g_i / sum_j g_j |D_j| with g ~ Dir(gamma + 1). The shares do not sum to one."""
    drawn = rng.dirichlet([gamma + 1] * len(sizes), samples).tolist()
    return [[a / sum(b * n for b, n in zip(g, sizes, strict=True)) for a in g] for g in drawn]


def dirichlet(
    sizes: Sequence[float], gamma: float, by_size: bool, samples: int, rng: np.random.Generator
) -> list[list[float]]:
    """Shares of the clients in each sample: g ~ Dir(gamma, ...) weighted by size, or omega ~ Dir(gamma |S| pi) with `by_size`.

    Only the second has the mean |D_i| / |D| when sizes differ.
    """
    if by_size:
        return rng.dirichlet([gamma * len(sizes) * n / sum(sizes) for n in sizes], samples).tolist()
    return [reweighted(g, sizes) for g in rng.dirichlet([gamma] * len(sizes), samples).tolist()]


def mixture(clients: Sequence[Params], shares: Sequence[float]) -> Params:
    """sum_i omega_i theta_i, a point in the convex hull of the clients if the shares sum to one."""
    model, total = average(zip(clients, shares, strict=True)), sum(shares)
    return model if abs(total - 1) < 1e-6 else model | scale(weights(model), total)


# Rates and probabilities --------------------------------------------------------------------------------------------


def learning_rate(schedule: Schedule, base: float, r: int, rounds: int) -> float:
    """The learning rate in round r = 0, 1, ..., rounds - 1.

    fedbe: 0.5 of the base rate in round 0, then 1, then 0.2, 0.1 and 0.01 after 30, 60 and 90 % of the rounds.
    literal: 0.9, 0.6 and 0.3 of the base rate from 30, 60 and 90 % of the rounds on, as FEDSBME's text says.

    >>> [learning_rate("fedbe", 0.01, r, 100) for r in (0, 1, 30, 31)]
    [0.005, 0.01, 0.01, 0.002]
    """
    if schedule == "fedbe":
        if r == 0:
            return 0.5 * base
        passed = [factor for tenths, factor in FEDBE if 10 * r > tenths * rounds]
    else:
        passed = [factor for tenths, factor in LITERAL if schedule == "literal" and 10 * r >= tenths * rounds]
    return (passed[-1] if passed else 1.0) * base


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised for each row.

    >>> sharpen(torch.tensor([[0.5, 0.3, 0.2]]), 0.5)
    tensor([[0.6579, 0.2368, 0.1053]])
    """
    q = p ** (1 / temperature)
    total = q.sum(-1, keepdim=True)
    if bool((total > 1e-30).all()):
        return q / total
    return torch.softmax(p.log() / temperature, -1)  # powers underflow: stay in log space
