"""The algebra of models: free functions on flat dicts of tensors.

Weights have plain names. The names of *buffers* (BatchNorm's running mean, variance and counter, and frozen parameters) start
with "~", which `Task` adds from the structure of the module. Corrections, scaling and sampling can therefore leave buffers
alone. Averages include them, except counters (integer tensors), which are taken from the first model.

Binary operations use the names of their *left* operand, so a correction of weights can be combined with a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from kilter.core import Params
from kilter.fast import foreach

BUFFER = "~"


def weights(p: Mapping[str, Tensor]) -> Params:
    """The trained parameters: everything except buffers."""
    return {k: v for k, v in p.items() if not k.startswith(BUFFER)}


def buffers(p: Mapping[str, Tensor]) -> Params:
    """The buffers: running means, variances, counters, frozen parameters."""
    return {k: v for k, v in p.items() if k.startswith(BUFFER)}


def pick(p: Mapping[str, Tensor], names: Collection[str]) -> Params:
    """The part of a model with these names. Use `|` to put parts together."""
    return {k: v for k, v in p.items() if k in names}


def drop(p: Mapping[str, Tensor], names: Collection[str]) -> Params:
    """The part of a model without these names."""
    return {k: v for k, v in p.items() if k not in names}


def apply(f: Callable[..., Tensor], a: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Params:
    """Apply f to the tensors of each name of the first model."""
    return {k: f(v, *(o[k] for o in others)) for k, v in a.items()}


def zeros(p: Mapping[str, Tensor]) -> Params:
    return apply(torch.zeros_like, p)


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    return apply(torch.add, a, b)


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    return apply(torch.sub, a, b)


def scale(p: Mapping[str, Tensor], s: float) -> Params:
    """s p; counters are unchanged."""
    return apply(lambda v: v * s if v.is_floating_point() else v, p)


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """<a, b>, over the names of a."""
    return torch.stack([(v * b[k]).sum() for k, v in a.items()]).sum()


def sq_norm(a: Mapping[str, Tensor]) -> Tensor:
    """|a|^2"""
    return dot(a, a)


def vector(p: Mapping[str, Tensor]) -> Tensor:
    """All numbers as one vector, in the order of the names."""
    return torch.cat([v.flatten() for v in p.values()])


def move(x: Mapping[str, Tensor], to: Mapping[str, Tensor], rate: float) -> Params:
    """x + rate (to - x) for weights. Buffers are those of `to`, whatever the rate."""
    return {k: v + rate * (to[k] - v) if not k.startswith(BUFFER) else to[k] for k, v in x.items()}


def average(models: Iterable[tuple[Mapping[str, Tensor], float]]) -> Params:
    """sum_k w_k p_k / sum_k w_k of (model, weight) pairs, in one pass, with one model in memory.

    This is the running mean m += w/W (p - m): the mean of identical models is the same model bit for bit, and every mean lies
    in the convex hull of the models. Counters (integer tensors) are those of the first model.

    >>> average([({"w": torch.tensor([1.0])}, 1), ({"w": torch.tensor([3.0])}, 3)])
    {'w': tensor([2.5000])}
    """
    mean: Params | None = None
    total = 0.0
    for model, weight in models:
        if not weight >= 0:
            raise ValueError(f"the weight of a model in an average must be at least 0, not {weight}")
        total += weight
        if mean is None:
            mean = {k: v.clone() for k, v in model.items()}
        elif weight > 0:
            floats = [k for k, v in mean.items() if v.is_floating_point()]
            foreach.lerp_([mean[k] for k in floats], [model[k] for k in floats], weight / total)
    if mean is None or total == 0:
        raise ValueError("an average needs at least one model with a positive weight")
    return mean


def mean(models: Iterable[Mapping[str, Tensor]]) -> Params:
    """The plain mean."""
    return average((m, 1.0) for m in models)


def count(p: Mapping[str, Tensor]) -> int:
    """The number of numbers in a model."""
    return sum(v.numel() for v in p.values())
