"""One client at a time: faster large convolutions for models that are too large for a stack, and faster pooling for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d
from torch.overrides import TorchFunctionMode

from kilter.fast import switch, winograd
from kilter.fast.client_random import Arguments, ClientRandom, Draws, NamedArguments, TorchFunction

# Whether a loss uses torch.func right now. A torch without this private function never takes the quick way.
TRANSFORMED: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
Pair = tuple[int, int]
WIDE = 500_000  # weights: from here on, the weight gradient is faster as a matrix product
SMALL = (2, 3)  # heights and widths of pooling windows for which strips are faster
CHANNELS = 64  # in and out: from here on, a 3x3 convolution is faster by Winograd's algorithm


def _pair(value: int | Pair) -> Pair:
    """One number for both directions, or one for each."""
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class Single(Draws):
    """Inside this context, random numbers are the client's own, and large convolutions are faster."""

    def __init__(self, random: ClientRandom) -> None:
        super().__init__(None, [random])
        if switch.cpu_kernels():
            self.own[conv2d] = quick_conv2d


class Quick(TorchFunctionMode):
    """Inside this context, large convolutions and maximum pooling are faster. For evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = switch.cpu_kernels()

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> object:
        return (QUICK.get(func, func) if self.enabled else func)(*args, **(kwargs or {}))


def quick_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """torch's conv2d, by other algorithms where they are faster."""
    usual = groups == 1 and _pair(dilation) == (1, 1) and input.dim() == 4
    if usual and not isinstance(padding, str) and not TRANSFORMED() and input.dtype == weight.dtype == torch.float32:
        m = _tile(input, weight, _pair(stride), _pair(padding))
        if m or (weight.requires_grad and weight.numel() >= WIDE):
            out: Tensor = _Large.apply(input, weight, bias, _pair(stride), _pair(padding), m)  # type: ignore[no-untyped-call]
            return out
    return conv2d(input, weight, bias, stride, padding, dilation, groups)


def quick_max_pool2d(
    input: Tensor,
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    **more: Any,
) -> Any:
    """torch's max_pool2d. Small windows become maxima of strips, which is many times faster where no gradient is needed."""
    window = _pair(kernel_size)
    down, right = window if stride is None else _pair(stride)
    usual = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and min(down, right) > 0 and not any(more.values())
    small = set(window) <= set(SMALL) and window[0] <= input.shape[-2] and window[1] <= input.shape[-1]
    if usual and small and not TRANSFORMED() and not (input.requires_grad and torch.is_grad_enabled()):
        return _maxima(_maxima(input, -2, window[0], down), -1, window[1], right)
    return max_pool2d(input, kernel_size, stride, padding, dilation, **more)


def _maxima(x: Tensor, dim: int, window: int, stride: int) -> Tensor:
    """The maximum of each window along this dimension."""
    length = (x.shape[dim] - window) // stride * stride + 1
    strips = (x.transpose(dim, 0)[i : i + length : stride].transpose(dim, 0) for i in range(window))
    return reduce(torch.maximum, strips)


QUICK: dict[object, Callable[..., Any]] = {conv2d: quick_conv2d, max_pool2d: quick_max_pool2d}


def _tile(x: Tensor, w: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> int:
    """The tile size m of Winograd's algorithm; 0: do not use it."""
    if w.shape[2:] != (3, 3) or stride != (1, 1) or max(padding) > 2 or min(w.shape[:2]) < CHANNELS:
        return 0
    high, wide = (size + 2 * p - 2 for size, p in zip(x.shape[2:], padding, strict=True))
    return winograd.tile(len(x), high, wide, w.shape[1], w.shape[0])


class _Large(torch.autograd.Function):
    """A convolution by Winograd's algorithm (m > 0), or torch's with a faster weight gradient (m = 0)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, m: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.padding, ctx.m = stride, padding, m
        if not m:
            return conv2d(x, w, b, stride, padding)
        y = winograd.convolve(x, w, padding, m)
        return y if b is None else y.add_(b[:, None, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_b, *_ = ctx.needs_input_grad
        settings = (list(ctx.stride), list(ctx.padding), [1, 1], False, [0, 0], 1)
        by_torch = partial(torch.ops.aten.convolution_backward, grad, x, w, [len(w)] if to_b else None, *settings)
        if torch.is_grad_enabled():  # second derivatives: only torch's own backward has them
            return (*by_torch([to_x, to_w, to_b]), None, None, None)
        db = grad.sum((0, 2, 3)) if to_b else None
        if ctx.m:
            dx = winograd.input_gradient(grad, w, ctx.padding, ctx.m) if to_x else None
            dw = winograd.weights_gradient(x, grad, ctx.padding, ctx.m) if to_w else None
            return dx, dw, db, None, None, None
        dx = by_torch([True, False, False])[0] if to_x else None
        return dx, weights_gradient(x, grad, w.shape[2:], ctx.stride, ctx.padding), db, None, None, None


def weights_gradient(x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The weight gradient of a convolution from x (rows, in, height, width) and the gradient of its output.

    One kernel row at a time. With height outermost and channels innermost in memory, the inputs of a kernel row form one
    contiguous matrix (for stride one); its product with the output gradient is the result.
    """
    rows, inputs, height, width = x.shape
    _, outputs, high, wide = grad.shape
    (kh, kw), (down, right), (above, left) = kernel, stride, padding
    framed = x.new_zeros(height + 2 * above, rows, width + 2 * left, inputs)
    framed[above : above + height, :, left : left + width] = x.permute(2, 0, 3, 1)
    per_row, per_height = framed.stride(1), framed.stride(0)
    inputs_of_row = framed.as_strided(
        (len(framed), rows, wide, kw * inputs), (per_height, per_row, right * inputs, 1)
    ).contiguous()
    outputs_grad = grad.permute(2, 0, 3, 1).reshape(-1, outputs).t()
    gradient = x.new_empty(outputs, kh, kw * inputs)
    for i in range(kh):
        here = inputs_of_row[i : i + down * (high - 1) + 1 : down].reshape(-1, kw * inputs)
        torch.mm(outputs_grad, here, out=gradient[:, i])
    return gradient.view(outputs, kh, kw, inputs).permute(0, 3, 1, 2)
