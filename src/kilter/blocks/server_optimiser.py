"""Server optimisers. Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization (ICLR 2021).

The change D that a method's `combine` makes to its model is taken as a gradient step: x <- x + lr step(D). This works for every
method that pools models: the runtime applies it after `combine`, and the aggregator keeps the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from inspect import isgenerator
from typing import Literal, get_args

import torch
from torch import Tensor

from kilter.core import Fit, Method, Node, Params, Replies, Tree
from kilter.errors import Mistake, unknown
from kilter.options import check, option
from kilter.params import BUFFER

MOMENTS = "~server"  # where the aggregator keeps the moments
Name = Literal["momentum", "adam", "yogi", "adagrad"]
RATES: dict[Name, float] = {"momentum": 1.0, "adam": 0.03, "yogi": 0.03, "adagrad": 0.03}
BETAS: dict[Name, float] = {"momentum": 0.9, "adam": 0.9, "yogi": 0.9, "adagrad": 0.0}


@dataclass(frozen=True)
class ServerOptimiser:
    """How the aggregator moves its model by the averaged change D.

    momentum: m <- b1 m + D, x <- x + lr m.  The others: m <- b1 m + (1-b1) D, x <- x + lr m / (sqrt(v) + tau), with
    adagrad: v <- v + D^2;  adam: v <- b2 v + (1-b2) D^2;  yogi: v <- v - (1-b2) D^2 sign(v - D^2). v starts at tau^2.
    """

    name: Name = "momentum"
    lr: float = option(1.0, "Learning rate of the server.", above=0)
    beta1: float = option(0.9, "Decay rate of the mean change.", at_least=0, below=1)
    beta2: float = option(0.99, "Decay rate of the mean squared change.", at_least=0, below=1)
    tau: float = option(1e-3, "Guard against division by zero; also the initial root of v.", above=0)

    def __post_init__(self) -> None:
        check(self, "the server optimiser")

    def step(self, x: Mapping[str, Tensor], new: Mapping[str, Tensor], moments: dict[str, Params]) -> Params:
        """The model after this round. Buffers are those of `new`. The moments are updated in place."""
        if self.name == "momentum" and self.lr == 1 and self.beta1 == 0:
            return dict(new)  # exactly the method itself
        moved = dict(new)
        means, squares = moments.setdefault("m", {}), moments.setdefault("v", {})
        for key, value in x.items():
            if key.startswith(BUFFER) or not value.is_floating_point() or key not in new:
                continue
            change = new[key] - value
            mean = means.get(key, torch.zeros_like(value))
            if self.name == "momentum":
                means[key] = self.beta1 * mean + change
                moved[key] = value + self.lr * means[key]
                continue
            means[key] = self.beta1 * mean + (1 - self.beta1) * change
            squares[key] = self._squares(squares.get(key, torch.full_like(value, self.tau**2)), change.square())
            moved[key] = value + self.lr * means[key] / (squares[key].sqrt() + self.tau)
        return moved

    def _squares(self, v: Tensor, square: Tensor) -> Tensor:
        if self.name == "adagrad":
            return v + square
        if self.name == "adam":
            return self.beta2 * v + (1 - self.beta2) * square
        return v - (1 - self.beta2) * square * torch.sign(v - square)


def parse(spec: str) -> ServerOptimiser | None:
    """From `adam` or `adam:lr=0.01,tau=0.001`; None for an empty text.

    >>> parse("yogi:lr=0.1").lr, parse("momentum").beta1, parse("")
    (0.1, 0.9, None)
    """
    if not spec:
        return None
    name, _, rest = spec.partition(":")
    if name not in get_args(Name):
        raise unknown("server optimiser", name, get_args(Name))
    chosen: Name = name  # type: ignore[assignment]
    known = [f.name for f in fields(ServerOptimiser) if f.name != "name"]
    values: dict[str, float] = {}
    for pair in filter(None, map(str.strip, rest.split(","))):
        setting, _, text = pair.partition("=")
        if setting not in known:
            raise unknown("setting of the server optimiser", setting, known)
        try:
            values[setting] = float(text)
        except ValueError:
            raise Mistake(f"--server takes NAME:SETTING=NUMBER, such as adam:lr=0.01, not '{pair}'.") from None
    return ServerOptimiser(chosen, **{"lr": RATES[chosen], "beta1": BETAS[chosen], **values})


Combine = Callable[[Node, Tree, Replies], Tree]


def optimised(combine: Combine) -> Combine:
    """The step `combine` of a method, followed by the method's server optimiser; `combine` itself if there is none."""
    method = getattr(combine, "__self__", None)
    if not isinstance(method, Method) or method.server is None:
        return combine
    optimiser = method.server

    @wraps(combine)
    def combined(hub: Node, state: Tree, replies: Replies) -> Generator[Fit, Tree, Tree]:
        outcome = combine(hub, state, replies)
        new = (yield from outcome) if isgenerator(outcome) else outcome
        before, after = model_in(method, state), model_in(method, new)
        moments = {name: dict(part) for name, part in hub.state.get(MOMENTS, {}).items()}
        moved = optimiser.step(before, after, moments)
        hub.state[MOMENTS] = moments
        return swapped(new, after, moved)

    return combined


def model_in(method: Method, state: Tree) -> Params:
    """The model that the nodes train, as an object inside the state."""
    model = method.model(state)
    if model is None and isinstance(state, dict) and all(isinstance(v, Tensor) for v in state.values()):
        model = state  # a part of a model, such as FedRep's body
    if model is None or not any(part is model for part in parts(state)):
        raise Mistake(
            f"{type(method).__name__} does not keep one averaged model, so --server has nothing to move: leave it out."
        )
    return model


def parts(tree: Tree) -> list[Tree]:
    """The tree and everything in it, without tensors."""
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tree, *(p for child in children if not isinstance(child, Tensor) for p in parts(child))]


def swapped(tree: Tree, old: Params, new: Params) -> Tree:
    """The tree with `new` in place of the object `old`."""
    if tree is old:
        return new
    if isinstance(tree, dict):
        return {k: v if isinstance(v, Tensor) else swapped(v, old, new) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(swapped(v, old, new) for v in tree))
    return type(tree)(swapped(v, old, new) for v in tree) if isinstance(tree, list | tuple) else tree
