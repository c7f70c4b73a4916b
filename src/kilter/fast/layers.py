"""Layers for stacked clients: how `vmap` computes convolutions, pooling, normalisation and linear layers of many clients.

`vmap` has a rule for every function, but its rules for these layers use a memory layout that is slower than a loop over
clients. Here the clients lie side by side in the channels, (rows, clients x channels, height, width), with channels innermost
in memory. A convolution is then one grouped convolution, BatchNorm and GroupNorm keep each client's own statistics, and what
lies between (ReLU, ...) keeps the layout. While a stack trains, `Layers` replaces torch's functions by the rules below. All
other functions are left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import vmap as torchs
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from kilter.fast import placement
from kilter.fast.client_random import ClientRandom, Draws

Dims = tuple[int | None, ...]  # the client dimension of each argument; None: shared by all clients
Batched = Any  # a tensor inside `vmap`
Plain = Callable[..., Batched]  # a function of torch with its settings, of tensors alone
BatchRule = Callable[..., tuple[Tensor, int]]  # (clients, dims, *tensors) -> (result, its client dimension)
Pair = tuple[int, int]
Statistic = Tensor | None
CHANNELWISE = (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d)  # functions of one channel at a time


def for_all(n: int, function: Callable[[Tensor, list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """`torch.func.vmap(function)` of (client number, tensors), without the 100 us per call that it spends on trees."""
    torchs.lazy_load_decompositions()  # type: ignore[attr-defined]
    level = functorch._vmap_increment_nesting(n, "error")  # random numbers that are not a client's own are an error
    try:
        me, *mine = [
            functorch._add_batch_dim(t, 0, level) for t in (torch.arange(n, device=placement.current()), *tensors)
        ]
        return functorch._remove_batch_dim(function(me, mine), level, n, 0)
    finally:
        functorch._vmap_decrement_nesting()


def _product(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x w + b for every client. A shared w is multiplied once for all."""
    if w.stride(0) == 0 and len(w) > 1:
        product = torch.mm(x.flatten(0, 1), w[0]).unflatten(0, x.shape[:2])
        return product if b is None else product.add_(b.unsqueeze(1))
    return torch.bmm(x, w) if b is None else torch.baddbmm(b.unsqueeze(1), x, w)


class _Linear(_SingleLevelFunction):
    """A linear layer for every client: x (clients, rows, in), w (clients, out, in), b (clients, out).

    Autograd's own backward of `baddbmm` returns the gradient of w transposed in memory, and adding that to w takes four times as
    long. The base class is autograd.Function without its 100 us check for transforms; none is active at this level.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return _product(x, w.mT, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _product(grad, w) if wanted[0] else None,
            torch.bmm(grad.mT, x) if wanted[1] else None,
            grad.sum(1) if wanted[2] else None,
        )


class Layers(Draws):
    """Inside this context, heavy layers are computed for all clients together, and random numbers are each client's own."""

    def __init__(self, me: Tensor, randoms: Sequence[ClientRandom]) -> None:
        super().__init__(me, randoms)
        self.own |= {
            F.conv2d: self.conv2d,
            F.linear: self.linear,
            F.batch_norm: self.batch_norm,
            F.group_norm: self.group_norm,
            F.cross_entropy: self.cross_entropy,
        }
        self.own |= {f: partial(self.channelwise, f) for f in CHANNELWISE}

    def lift(self, plain: Plain, rule: BatchRule, *tensors: Tensor | None) -> Batched:
        """What `plain` would compute, by this rule.

        The public way, an autograd.Function with its own `vmap`, takes 170 us per call: more than a small layer.
        """
        level = functorch.maybe_get_level(self.me)  # type: ignore[arg-type]
        unwrapped: list[Tensor | None] = []
        dims: list[int | None] = []
        for t in tensors:
            if t is None or not functorch.is_functorch_wrapped_tensor(t):
                unwrapped.append(t)
                dims.append(None)
            elif functorch.is_batchedtensor(t) and functorch.maybe_get_level(t) == level:
                unwrapped.append(functorch.get_unwrapped(t))
                dims.append(functorch.maybe_get_bdim(t))
            else:  # a torch.func transform inside the loss
                return plain(*tensors)
        if not any(d is not None for d in dims):  # shared by all clients
            return plain(*tensors)
        out, dim = rule(len(self.randoms), tuple(dims), *unwrapped)
        return functorch._add_batch_dim(out, dim, level)

    def conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
    ) -> Batched:
        def plain(x: Tensor, w: Tensor, b: Tensor | None, clients: int = 1) -> Tensor:
            return F.conv2d(x, w, b, stride, padding, dilation, clients * groups)

        def rule(n: int, dims: Dims, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, int]:
            if dims[1] is None and (b is None or dims[2] is None):  # one filter for all clients: more rows
                return plain(_first(n, x, dims[0]).flatten(0, 1), w, b).unflatten(0, (n, -1)), 0
            filters = _inside(_first(n, w, dims[1]).flatten(0, 1))
            if (
                n * w.shape[-3] == 1
            ):  # one client, one channel: both layouts look alike to torch, which takes the slow one
                filters = filters.as_strided(filters.shape, (filters[0].numel(), 1, filters.shape[-1], 1))
            offsets = None if b is None else _flat(n, b, dims[2])
            return plain(_inside(_beside(n, x, dims[0])), filters, offsets, n).unflatten(1, (n, -1)), 1

        return self.lift(plain, rule, input, weight, bias) if input.dim() == 4 else plain(input, weight, bias)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Batched:
        def rule(n: int, dims: Dims, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, int]:
            rows = _first(n, x, dims[0])
            if dims[1] is None:  # one matrix for all clients: more rows
                out = F.linear(rows, w)
                return out if b is None else out + _first(n, b, dims[2]).unsqueeze(1), 0
            offsets = None if b is None else _first(n, b, dims[2])
            with enable_single_level_autograd_function():
                return _Linear.apply(rows, _first(n, w, dims[1]), offsets), 0  # type: ignore[attr-defined]

        if input.dim() == 2:
            return self.lift(F.linear, rule, input, weight, bias)
        return self.lift(F.linear, rule, input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])

    def channelwise(self, function: Plain, input: Tensor, *args: object, **kwargs: object) -> Batched:
        def plain(x: Tensor) -> Batched:
            return function(x, *args, **kwargs)

        def rule(n: int, dims: Dims, x: Tensor) -> tuple[Tensor, int]:
            return plain(_inside(_beside(n, x, dims[0]))).unflatten(1, (n, -1)), 1

        one_result = input.dim() == 4 and not kwargs.get("return_indices")
        return self.lift(plain, rule, input) if one_result else plain(input)

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Batched:
        def plain(x: Tensor, mean: Statistic, var: Statistic, w: Statistic, b: Statistic) -> Tensor:
            return F.batch_norm(x, mean, var, w, b, training, momentum, eps)

        def rule(n: int, dims: Dims, x: Tensor, *own: Tensor | None) -> tuple[Tensor, int]:
            if training and any(t is not None and d is None for t, d in zip(own[:2], dims[1:3], strict=True)):
                raise NotImplementedError("running statistics that clients share")
            flat = [None if t is None else _flat(n, t, d) for t, d in zip(own, dims[1:], strict=True)]
            return plain(_beside(n, x, dims[0]), *flat).unflatten(1, (n, -1)), 1

        return self.lift(plain, rule, input, running_mean, running_var, weight, bias)

    def group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Batched:
        def plain(x: Tensor, w: Tensor | None, b: Tensor | None, clients: int = 1) -> Tensor:
            return F.group_norm(x, clients * num_groups, w, b, eps)

        def rule(n: int, dims: Dims, x: Tensor, *own: Tensor | None) -> tuple[Tensor, int]:
            w, b = (None if t is None else _flat(n, t, d) for t, d in zip(own, dims[1:], strict=True))
            return plain(_beside(n, x, dims[0]), w, b, n).unflatten(1, (n, -1)), 1

        return self.lift(plain, rule, input, weight, bias)

    def cross_entropy(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean", **more: Any
    ) -> Batched:
        def plain(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x, y, weight, reduction=reduction, **more)

        def rule(n: int, dims: Dims, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
            rows = _first(n, x, dims[0]).flatten(0, 1), _first(n, y, dims[1]).flatten(0, 1)
            return plain(*rows).unflatten(0, (n, -1)), 0

        by_row = input.dim() == 2 and weight is None and reduction == "none"
        return self.lift(plain, rule, input, target) if by_row else plain(input, target)


def _first(n: int, x: Tensor, dim: int | None) -> Tensor:
    """(clients, ...)"""
    if dim is None:
        return x.expand(n, *x.shape)
    return x.movedim(dim, 0) if dim else x


def _beside(n: int, x: Tensor, dim: int | None) -> Tensor:
    """(rows, clients x channels, ...)"""
    x = x.unsqueeze(1).expand(-1, n, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
    return x.flatten(1, 2)


def _flat(n: int, x: Tensor, dim: int | None) -> Tensor:
    """(clients x channels); a view where it can be, so that running statistics are written where they are kept."""
    return _first(n, x, dim).flatten()


def _inside(x: Tensor) -> Tensor:
    """Channels innermost in memory."""
    return x.contiguous(memory_format=torch.channels_last)
