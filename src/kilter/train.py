"""The local optimisers: how a `Fit` is performed.

`run_one` trains one node; `kilter.fast` trains several as one computation, with the same plans. The optimisers use the
arithmetic of torch.optim (tests compare bit for bit) on flat lists of tensors. Importing torch.optim takes 1.9 s in every process,
and it cannot train several clients as one computation.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self

import torch
from torch import Tensor

from kilter.core import Fit, Params
from kilter.errors import Mistake, unknown
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
    schedule: Literal["constant", "step", "cosine", "linear"] = option(
        "constant", "How the learning rate falls: step divides by 10 at one half and at three quarters of the schedule."
    )
    schedule_by: Literal["round", "step"] = option("round", "The schedule counts rounds, or local steps in each round.")
    schedule_length: int = option(0, "Length of the schedule; 0: the number of rounds.", at_least=0)
    warmup: int = option(0, "Rounds or steps in which the learning rate rises to its value.", at_least=0)
    accumulate: int = option(1, "Batches whose gradients are averaged into one step.", at_least=1)

    def __post_init__(self) -> None:
        check(self, type(self).__name__)
        if self.schedule != "constant" and self.schedule_length <= self.warmup:
            raise Mistake(
                f"The schedule {self.schedule} needs schedule_length, more than the {self.warmup} of warmup "
                f"(it is {self.schedule_length})."
            )

    def steps(self, rows: int) -> int:
        """The number of steps in a fit on this many rows."""
        return -(-self.epochs * len(lengths(rows, self.batch)) // self.accumulate)

    @property
    def alone(self) -> bool:
        """Whether fits with this plan train one by one."""
        return self.accumulate > 1

    def run(self, fit: Fit) -> Fitted | None:
        """Perform a whole fit, for plans that are no optimisers (`kilter.tasks.training_loop`); None: step by step."""
        return None

    def factor(self, k: int) -> float:
        """The learning rate at place k = 0, 1, ... of the schedule, as a share of `lr`."""
        if k < self.warmup:
            return (k + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return 1.0
        share = min((k - self.warmup) / (self.schedule_length - self.warmup), 1.0)
        if self.schedule == "step":
            return 0.01 if share >= 0.75 else 0.1 if share >= 0.5 else 1.0
        return 1 - share if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))

    @property
    def is_scheduled(self) -> bool:
        """Whether the learning rate changes by the schedule."""
        return self.schedule != "constant" or self.warmup > 0

    def rate_at(self, t: int) -> float:
        """The learning rate of step t = 1, 2, ..."""
        return self.lr * self.factor(t - 1) if self.is_scheduled and self.schedule_by == "step" else self.lr

    @property
    def rate(self) -> float | None:
        """The rate, if a step is exactly w - rate g; else None."""
        return None

    def at(self, round: int) -> Self:
        """The plan of this round."""
        by_round = self.is_scheduled and self.schedule_by == "round"
        if self.decay == 1.0 and not by_round:
            return self
        plan = copy(self)  # not `replace`, which checks ranges: after many rounds the rate may underflow to 0
        share = self.factor(max(round - 1, 0)) if by_round else 1.0
        object.__setattr__(plan, "lr", self.lr * self.decay ** max(round - 1, 0) * share)
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
        varies = self.is_scheduled and self.schedule_by == "step"
        return None if self.momentum or self.weight_decay or self.clip or varies else self.lr

    def travel(self, rows: int) -> float:
        steps, m = self.steps(rows), self.momentum
        if self.is_scheduled and self.schedule_by == "step":
            # Gradient t counts with the rates of all later steps that its momentum reaches.
            rates = [self.rate_at(t) for t in range(1, steps + 1)]
            return sum(rate * sum(m**k for k in range(t)) for t, rate in enumerate(rates, start=1))
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
        foreach.add_(weights, grads, alpha=-self.rate_at(t))


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
        grads = self._with_decay(weights, grads, t)
        foreach.lerp_(first, grads, 1 - self.beta1)
        foreach.mul_(second, self.beta2)
        foreach.addcmul_(second, grads, grads, 1 - self.beta2)
        root = foreach.sqrt(second)
        foreach.div_(root, math.sqrt(1 - self.beta2**t))
        foreach.add_(root, self.eps)
        foreach.addcdiv_(weights, first, root, -self.rate_at(t) / (1 - self.beta1**t))

    def _with_decay(self, weights: list[Tensor], grads: list[Tensor], t: int) -> list[Tensor]:
        """The gradients with weight decay as an L2 penalty."""
        return list(foreach.add(grads, weights, alpha=self.weight_decay)) if self.weight_decay else grads


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter): weights shrink by lr * weight_decay in every step."""

    weight_decay: float = option(0.01, "Strength of the weight decay.", at_least=0)

    def _with_decay(self, weights: list[Tensor], grads: list[Tensor], t: int) -> list[Tensor]:
        if self.weight_decay:
            foreach.mul_(weights, 1 - self.rate_at(t) * self.weight_decay)
        return grads


class _Held(list[list[Tensor]]):
    """The state of an optimiser of torch.optim, which the optimiser keeps itself."""

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimiser = optimiser


@dataclass(frozen=True, kw_only=True)
class TorchOptimiser(Plan):
    """Any optimiser of torch.optim by its class name. Fits train one by one."""

    name: str = option("RMSprop", "A class of torch.optim.")
    options: str = option("", "Settings of a class of torch.optim, such as alpha=0.9,momentum=0.5.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._arguments()

    @property
    def alone(self) -> bool:
        return True

    def _arguments(self) -> dict[str, float | bool]:
        """The settings, checked against the signature of the class. Only numbers, true and false are accepted."""
        known = dict(inspect.signature(torch_class(self.name)).parameters)
        arguments: dict[str, float | bool] = {}
        for pair in filter(None, map(str.strip, self.options.split(","))):
            name, _, value = pair.partition("=")
            if name in ("lr", "weight_decay", "params") or name not in known:
                raise Mistake(f"'{name}' is no setting for --options of {self.name}: it has {', '.join(known)}.")
            try:
                arguments[name] = {"true": True, "false": False}[value] if value in ("true", "false") else float(value)
            except ValueError:
                raise Mistake(f"--options takes NAME=NUMBER, not '{pair}'.") from None
        if "weight_decay" in known:
            arguments["weight_decay"] = self.weight_decay
        elif self.weight_decay:
            raise Mistake(f"{self.name} has no weight decay: leave it out.")
        return arguments

    def begin(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        return _Held(torch_class(self.name)(list(weights), lr=self.lr, **self._arguments()))

    def update(self, weights: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], t: int) -> None:
        assert isinstance(state, _Held)
        for group in state.optimiser.param_groups:
            group["lr"] = self.rate_at(t)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        state.optimiser.step()


NOT_SUPPORTED = ("LBFGS", "SparseAdam", "Muon", "Optimizer")  # closures, sparse gradients, matrices only


def torch_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """A class of torch.optim by its name."""
    kinds = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key not in NOT_SUPPORTED
    }
    if name not in kinds:
        raise unknown("optimiser", name, [*PLANS, *kinds])
    return kinds[name]


PLANS: dict[str, type[Plan]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def plan_class(optimiser: str) -> type[Plan]:
    """The plan of an optimiser: sgd, adam, adamw, or a class of torch.optim."""
    return PLANS.get(optimiser, TorchOptimiser)


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
    if (own := fit.plan.run(fit)) is not None:
        return own
    names, positions = trainable(fit), list(batches(fit))
    fit = placement.place(fit)
    params = {k: v.clone() if v is fit.params[k] else v for k, v in channels_last(fit.params).items()}
    leaves = [params[k].requires_grad_() for k in names]
    state = fit.plan.begin(leaves)
    total, batches_seen = torch.zeros((), device=placement.current()), 0
    gathered: list[Tensor] = []  # gradients of the batches since the last step
    scale = placement.LossScale()
    # Dropout and the like draw from the fit's own generator; functions unknown there, from torch's, seeded with the same number.
    single = Single(ClientRandom(fit.seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fit.seed)
        for batches_seen, batch in enumerate(placement.batches(fit.rows, positions), start=1):
            with single, placement.autocast():
                loss = fit.loss(params, batch, fit.ctx)
            raw = torch.autograd.grad(scale.up(loss), leaves, allow_unused=True)
            with torch.no_grad():
                grads = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, raw, strict=True)]
                scale.down_(grads)
                total += loss.detach()
                if fit.plan.accumulate > 1:
                    gathered = list(foreach.add(gathered, grads)) if gathered else grads
                    since = (batches_seen - 1) % fit.plan.accumulate + 1
                    if since < fit.plan.accumulate and batches_seen < len(positions):
                        continue
                    grads, gathered = [g / since for g in gathered], []
                if fit.plan.clip:
                    clip_(grads, fit.plan.clip)
                fit.plan.update(leaves, grads, state, -(-batches_seen // fit.plan.accumulate))
    trained = {k: v.detach().contiguous() for k, v in params.items()}
    mean_loss = float(total) / max(batches_seen, 1)
    return Fitted(
        trained if placement.on_cpu() else placement.to_host(trained),
        mean_loss,
        -(-batches_seen // fit.plan.accumulate),
    )
