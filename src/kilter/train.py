"""The local optimisers: how a `Fit` is performed.

`run_one` trains one node; `kilter.fast` trains several as one computation, with the same plans. The optimisers use the
arithmetic of torch.optim (tests compare bit for bit) on flat lists of tensors. Importing torch.optim takes 1.9 s in every process,
and it cannot train several clients as one computation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from kilter.core import Fit, Params
from kilter.errors import Mistake
from kilter.fast import foreach, placement
from kilter.fast.client_random import ClientRandom
from kilter.fast.memory_layout import channels_last
from kilter.fast.single import Single
from kilter.options import check, option
from kilter.params import BUFFER
from kilter.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """How a node trains: the number of epochs, the batches, the update rule."""

    lr: float = option(0.01, "Learning rate.", above=0)
    epochs: int = option(1, "Passes over the node's rows in a round.", at_least=1)
    batch: int = option(32, "Rows in a batch; 0: all rows.", at_least=0)
    weight_decay: float = option(0.0, "Strength of the L2 penalty.", at_least=0)
    clip: float = option(0.0, "Largest gradient norm; 0: no limit.", at_least=0)
    decay: float = option(1.0, "Factor applied to the learning rate after every round.", above=0)

    def __post_init__(self) -> None:
        check(self, type(self).__name__)

    def steps(self, rows: int) -> int:
        """The number of steps in a fit on this many rows."""
        return self.epochs * len(lengths(rows, self.batch))

    @property
    def rate(self) -> float | None:
        """The rate, if a step is exactly w - rate g; else None."""
        return None

    def at(self, round: int) -> Self:
        """The plan of this round."""
        if self.decay == 1.0:
            return self
        plan = copy(self)  # not `replace`, which checks ranges: after many rounds the rate may underflow to 0
        object.__setattr__(plan, "lr", self.lr * self.decay ** max(round - 1, 0))
        return plan

    def travel(self, rows: int) -> float:
        """The distance that a constant gradient of one moves a weight in a fit: (x - y) / travel is a mean gradient."""
        raise Mistake(
            f"This method computes gradients from the change of the weights, which {type(self).__name__} rules out: use SGD."
        )

    @abstractmethod
    def begin(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """The initial state of the optimiser."""

    @abstractmethod
    def update(self, weights: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], t: int) -> None:
        """Take step t = 1, 2, ... in place."""


@dataclass(frozen=True, kw_only=True)
class SGD(Plan):
    """Stochastic gradient descent with optional momentum."""

    lr: float = option(0.1, "Learning rate.", above=0)
    momentum: float = option(0.0, "Momentum.", at_least=0, below=1)

    @property
    def rate(self) -> float | None:
        return None if self.momentum or self.weight_decay or self.clip else self.lr

    def travel(self, rows: int) -> float:
        steps, m = self.steps(rows), self.momentum
        # Gradient t = 1..K counts 1 + m + ... + m^(K-t) times. Without momentum the sum is K.
        return self.lr * (sum((1 - m**k) / (1 - m) for k in range(1, steps + 1)) if m else steps)

    def begin(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[torch.zeros_like(w) for w in weights]] if self.momentum else []

    def update(self, weights: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], t: int) -> None:
        if self.weight_decay:
            grads = list(foreach.add(grads, weights, alpha=self.weight_decay))
        if self.momentum:
            (velocity,) = state
            foreach.mul_(velocity, self.momentum)
            foreach.add_(velocity, grads)
            grads = velocity
        foreach.add_(weights, grads, alpha=-self.lr)


@dataclass(frozen=True, kw_only=True)
class Adam(Plan):
    """Adam (Kingma, Ba)."""

    lr: float = option(1e-3, "Learning rate.", above=0)
    beta1: float = option(0.9, "Adam's decay rate of the mean gradient.", at_least=0, below=1)
    beta2: float = option(0.999, "Adam's decay rate of the mean squared gradient.", at_least=0, below=1)
    eps: float = option(1e-8, "Adam's guard against division by zero.", above=0)

    def begin(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[torch.zeros_like(w) for w in weights] for _ in range(2)]

    def update(self, weights: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], t: int) -> None:
        first, second = state
        if self.weight_decay:
            grads = list(foreach.add(grads, weights, alpha=self.weight_decay))
        foreach.lerp_(first, grads, 1 - self.beta1)
        foreach.mul_(second, self.beta2)
        foreach.addcmul_(second, grads, grads, 1 - self.beta2)
        root = foreach.sqrt(second)
        foreach.div_(root, math.sqrt(1 - self.beta2**t))
        foreach.add_(root, self.eps)
        foreach.addcdiv_(weights, first, root, -self.lr / (1 - self.beta1**t))


PLANS: dict[str, type[Plan]] = {"sgd": SGD, "adam": Adam}


@dataclass(frozen=True)
class Fitted:
    """The result of a Fit."""

    params: Params
    loss: float  # mean over the steps
    steps: int


@lru_cache(1024)
def lengths(rows: int, batch: int) -> tuple[int, ...]:
    """The batch sizes of an epoch. A single last row joins the batch before it, because BatchNorm cannot train on one row.

    >>> lengths(70, 32), lengths(65, 32), lengths(20, 32)
    ((32, 32, 6), (32, 33), (20,))
    """
    if not batch or batch >= rows:
        return (rows,)
    whole, rest = divmod(rows, batch)
    if rest == 1 and batch > 1:
        return (batch,) * (whole - 1) + (batch + 1,)
    return (batch,) * whole + ((rest,) if rest else ())


def order(fit: Fit) -> Tensor:
    """The positions of the rows of all steps, one after another. Every epoch has a new order, derived from the seed of the fit."""
    n, size, epochs = len(fit.rows), fit.plan.batch, fit.plan.epochs
    if not size or size >= n:
        return torch.arange(n).repeat(epochs)
    rng = generator(fit.seed, "batches")
    orders = [torch.randperm(n, generator=rng) for _ in range(epochs)]
    return orders[0] if epochs == 1 else torch.cat(orders)


def batches(fit: Fit) -> Iterator[Tensor | slice]:
    """The positions of the rows of each step."""
    sizes = lengths(len(fit.rows), fit.plan.batch)
    if not fit.plan.batch or fit.plan.batch >= len(fit.rows):
        yield from [slice(None)] * fit.plan.epochs
    else:
        yield from order(fit).split(sizes * fit.plan.epochs)


def trainable(fit: Fit) -> list[str]:
    """The names of the parameters that a fit trains: those it selects, or all weights."""
    if fit.train is not None:
        return [k for k in fit.params if k in fit.train and not k.startswith(BUFFER)]
    return [k for k, v in fit.params.items() if not k.startswith(BUFFER) and v.is_floating_point()]


def clip_(grads: list[Tensor], limit: float) -> None:
    """Scale the gradient down to this norm if it is larger."""
    norm = torch.stack(foreach.norm(grads)).norm()
    foreach.mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))


def run_one(fit: Fit) -> Fitted:
    """Train one node, step by step, on the current device."""
    names, positions = trainable(fit), list(batches(fit))
    fit = placement.place(fit)
    params = {k: v.clone() if v is fit.params[k] else v for k, v in channels_last(fit.params).items()}
    leaves = [params[k].requires_grad_() for k in names]
    state = fit.plan.begin(leaves)
    total, t = torch.zeros((), device=placement.current()), 0
    scale = placement.LossScale()
    # Dropout and the like draw from the fit's own generator; functions unknown there, from torch's, seeded with the same number.
    single = Single(ClientRandom(fit.seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fit.seed)
        for t, batch in enumerate(placement.batches(fit.rows, positions), start=1):
            with single, placement.autocast():
                loss = fit.loss(params, batch, fit.ctx)
            raw = torch.autograd.grad(scale.up(loss), leaves, allow_unused=True)
            with torch.no_grad():
                grads = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, raw, strict=True)]
                scale.down_(grads)
                if fit.plan.clip:
                    clip_(grads, fit.plan.clip)
                fit.plan.update(leaves, grads, state, t)
                total += loss.detach()
    trained = {k: v.detach().contiguous() for k, v in params.items()}
    return Fitted(trained if placement.on_cpu() else placement.to_host(trained), float(total) / max(t, 1), t)
