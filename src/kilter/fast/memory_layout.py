"""Where numbers lie in memory and in which order layers come: for speed only, the numbers stay what they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kilter.core import Params
from kilter.fast import switch


def channels_last(params: Mapping[str, Tensor]) -> Params:
    """The same model with the filters of 2-d convolutions laid out channels innermost.

    A convolution follows its filters' layout and so do the layers after it. Results differ by rounding of the same
    order: ResNet-18 after two steps is 5.8e-3 of the update from float64's with GroupNorm, 4.5e-3 in the usual layout.
    """
    if not switch.enabled():
        return dict(params)
    return {k: _inside(v) if v.dim() == 4 else v for k, v in params.items()}


def _inside(w: Tensor) -> Tensor:
    _, i, h, k = w.shape
    # With one input channel both layouts look alike to torch, which then takes the slow one: so the strides are set by hand.
    return w.new_empty_strided(w.shape, (i * h * k, 1, k * i, i)).copy_(w)


ALIGN = 64  # bytes: where torch's tensors begin; kernels may round otherwise at another


def unstack(stack: Tensor) -> Sequence[Tensor]:
    """The tensors of a stack. Each begins where torch would have put it, for kernels may round otherwise at another alignment:
    views where they do, else copies."""
    return stack.unbind() if stack[0].nbytes % ALIGN == 0 else [part.clone() for part in stack]


Allocate = Callable[[Sequence[int], torch.dtype], Tensor | None]  # an empty tensor where it is wanted, if there is room
_allocate: Allocate | None = None


@contextmanager
def allocate_stacks_with(allocate: Allocate) -> Iterator[None]:
    """While this is on, stacks of clients are laid where the runtime wants them: they need not be copied there to be sent."""
    global _allocate
    _allocate = allocate
    try:
        yield
    finally:
        _allocate = None


def stack_tensors(parts: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, on the runtime's allocate."""
    out = _allocate((len(parts), *parts[0].shape), parts[0].dtype) if _allocate else None
    return torch.stack(list(parts), out=out)


def pool_before_relu(net: nn.Module) -> nn.Module:
    """The network with `ReLU, MaxPool2d` in a Sequential as `MaxPool2d, ReLU`: a quarter of the work for 2x2 pools.

    max(relu(x)) = relu(max(x)) to the bit, and so are the gradients: they go to the first largest, and nowhere if that is not
    positive. Names of parameters stay, for neither has any.
    """
    for part in net.modules():
        if type(part) is nn.Sequential:
            for i in range(len(part) - 1):
                if type(part[i]) is nn.ReLU and type(part[i + 1]) is nn.MaxPool2d and not part[i + 1].return_indices:
                    part[i], part[i + 1] = part[i + 1], part[i]
    return net


def keep_memory(large: bool = False) -> None:
    """Let this process keep up to 512 MB that it has freed (glibc): to get it back page by page takes longer than a layer.

    `large`: arrays over 32 MB too, which glibc otherwise gives back at once: letters with large models take half the time then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another libc
        return
    mmap_threshold, trim_threshold, top_pad, mmap_max = -3, -1, -2, -4
    for setting, value in ((mmap_threshold, 32 << 20), (trim_threshold, 512 << 20), (top_pad, 64 << 20)):
        mallopt(setting, value)
    if large:
        mallopt(mmap_max, 0)
