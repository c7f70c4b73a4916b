"""Memory layout and layer order. For speed only: results are the same up to rounding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kilter.core import Params
from kilter.fast import switch


def channels_last(params: Mapping[str, Tensor]) -> Params:
    """The same model with the filters of 2-d convolutions in channels_last layout.

    A convolution follows the layout of its filters, and so do the layers after it. Results differ by rounding of the same order:
    ResNet-18 with GroupNorm is 5.8e-3 of the update away from float64 after two steps, 4.5e-3 in the usual layout.
    """
    if not switch.cpu_layout():
        return dict(params)
    return {k: _inside(v) if v.dim() == 4 else v for k, v in params.items()}


def _inside(w: Tensor) -> Tensor:
    _, i, h, k = w.shape
    # With one input channel, torch cannot tell the layouts apart and picks the slow one: so set the strides explicitly.
    return w.new_empty_strided(w.shape, (i * h * k, 1, k * i, i)).copy_(w)


ALIGN = 64  # bytes: alignment of torch's tensors. Another alignment can change rounding.


def unstack(stack: Tensor) -> Sequence[Tensor]:
    """The tensors of a stack: views if each is aligned as torch aligns tensors, otherwise copies. Alignment can change rounding."""
    return stack.unbind() if stack[0].nbytes % ALIGN == 0 else [part.clone() for part in stack]


Allocate = Callable[[Sequence[int], torch.dtype], Tensor | None]  # an empty tensor, or None: no room
_allocate: Allocate | None = None


@contextmanager
def allocate_stacks_with(allocate: Allocate) -> Iterator[None]:
    """Inside this context, stacks are allocated by the runtime, so that sending them needs no copy."""
    global _allocate
    _allocate = allocate
    try:
        yield
    finally:
        _allocate = None


def stack_tensors(parts: Sequence[Tensor]) -> Tensor:
    """`torch.stack` into memory that the runtime allocates."""
    out = _allocate((len(parts), *parts[0].shape), parts[0].dtype) if _allocate else None
    return torch.stack(list(parts), out=out)


def pool_before_relu(net: nn.Module) -> nn.Module:
    """The same network with `ReLU, MaxPool2d` in a Sequential swapped to `MaxPool2d, ReLU`: a quarter of the work for 2x2 pools.

    max(relu(x)) = relu(max(x)) bit for bit, and so are the gradients. Parameter names do not change: neither layer has any.
    """
    for part in net.modules():
        if type(part) is nn.Sequential:
            for i in range(len(part) - 1):
                if type(part[i]) is nn.ReLU and type(part[i + 1]) is nn.MaxPool2d and not part[i + 1].return_indices:
                    part[i], part[i + 1] = part[i + 1], part[i]
    return net


def keep_memory(large: bool = False, most: int = 512 << 20) -> None:
    """Let this process keep up to `most` bytes of freed memory (glibc). Getting it back page by page takes longer than a layer.

    `large`: also keep arrays over 32 MB, which glibc otherwise returns at once. Letters with large models then take half the time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another libc
        return
    mmap_threshold, trim_threshold, top_pad, mmap_max = -3, -1, -2, -4
    for setting, value in ((mmap_threshold, 32 << 20), (trim_threshold, most), (top_pad, most // 8)):
        mallopt(setting, value)
    if large:
        mallopt(mmap_max, 0)
