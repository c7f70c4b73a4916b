"""One client by itself: how layers are computed that are too large for a stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.modules.utils import _pair

from kilter.stacking.chance import Dice, Draws

WIDE = 500_000  # weights of a convolution; from here on its weights' gradient is faster as a product of matrices


class Alone(Draws):
    """While this is on, chance is the client's own, and large convolutions learn faster."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(None, [dice])
        self.own[conv2d] = self.conv2d

    def conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str) and input.dim() == 4
        if plain and weight.numel() >= WIDE and weight.requires_grad and type(weight) is Tensor:
            out: Tensor = _Wide.apply(input, weight, bias, _pair(stride), _pair(padding))  # type: ignore[no-untyped-call]
            return out
        return conv2d(input, weight, bias, stride, padding, dilation, groups)


class _Wide(torch.autograd.Function):
    """torch's convolution but for the weights' gradient: with 512 channels torch takes twice as long for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.padding = stride, padding
        return conv2d(x, w, b, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            settings = (list(ctx.stride), list(ctx.padding), [1, 1], False, [0, 0], 1, [True, False, False])
            dx = torch.ops.aten.convolution_backward(grad, x, w, None, *settings)[0]
        db = grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, weights_gradient(x, grad, w.shape[2:], ctx.stride, ctx.padding), db, None, None


def weights_gradient(x: Tensor, grad: Tensor, kernel: Any, stride: Any, padding: Any) -> Tensor:
    """Of a convolution: x (rows, in, height, width) and the gradient of its output give that of its weights.

    A row of the kernel at a time. With heights outermost and channels innermost in memory, what this row of weights has seen in
    all places is a matrix that lies in one piece (for a stride of one): its product with the gradient is the answer.
    """
    rows, inputs, height, width = x.shape
    _, outputs, high, wide = grad.shape
    (kh, kw), (down, right), (above, left) = kernel, stride, padding
    framed = x.new_zeros(height + 2 * above, rows, width + 2 * left, inputs)
    framed[above : above + height, :, left : left + width] = x.permute(2, 0, 3, 1)
    per_row, per_height = framed.stride(1), framed.stride(0)
    seen = framed.as_strided(
        (len(framed), rows, wide, kw * inputs), (per_height, per_row, right * inputs, 1)
    ).contiguous()
    told = grad.permute(2, 0, 3, 1).reshape(-1, outputs).t()
    found = x.new_empty(outputs, kh, kw * inputs)
    for i in range(kh):
        here = seen[i : i + down * (high - 1) + 1 : down].reshape(-1, kw * inputs)
        torch.mm(told, here, out=found[:, i])
    return found.view(outputs, kh, kw, inputs).permute(0, 3, 1, 2)
