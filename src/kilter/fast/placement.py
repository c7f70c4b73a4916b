"""Where fits and predictions are computed: the CPU, or an accelerator.

Methods see CPU tensors only. A fit is copied to the device once, trains there, and its parameters are copied back once. Tables of
rows stay on the device if they fit; otherwise batches are gathered on the CPU and copied while the previous one trains.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from kilter.core import Batch, Fit, Rows, Tree

CPU = torch.device("cpu")
SHARE = 0.5  # of the device's free memory that resident tables may take

_device: ContextVar[torch.device] = ContextVar("device", default=CPU)
_precision: ContextVar[torch.dtype] = ContextVar("precision", default=torch.float32)
_resident: dict[tuple[int, torch.device], Tensor] = {}  # (id of a table on the CPU, device) -> its copy there


def current() -> torch.device:
    """The device that computes now."""
    return _device.get()


def on_cpu() -> bool:
    return _device.get().type == "cpu"


def is_mixed_precision() -> bool:
    return _precision.get() != torch.float32


@contextmanager
def use(device: torch.device, precision: torch.dtype = torch.float32) -> Iterator[None]:
    """Inside this block, fits and predictions are computed on this device, with layers in this precision."""
    tokens = _device.set(device), _precision.set(precision)
    try:
        yield
    finally:
        _device.reset(tokens[0])
        _precision.reset(tokens[1])


def autocast() -> AbstractContextManager[object]:
    """Layers in the current precision; parameters, their gradients and sums stay float32."""
    if _precision.get() == torch.float32:
        return nullcontext()
    return torch.autocast(_device.get().type, _precision.get())


def to_device(tree: Tree) -> Tree:
    """The tree with its tensors on the current device."""
    return _mapped(lambda t: t.to(_device.get()), tree)


def to_host(tree: Tree) -> Tree:
    """The tree with its tensors on the CPU."""
    return _mapped(lambda t: t.cpu(), tree)


def _mapped(move: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    if isinstance(tree, Tensor):
        return move(tree)
    if isinstance(tree, Mapping):
        return {k: _mapped(move, v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(move, v) for v in tree)
    return tree


def place(fit: Fit) -> Fit:
    """The fit with parameters, constants and (if they fit) rows on the current device."""
    if on_cpu():
        return fit
    rows = resident(fit.rows)
    return replace(fit, params=to_device(fit.params), ctx=to_device(fit.ctx), rows=rows or fit.rows)


def resident(rows: Rows) -> Rows | None:
    """The rows with all columns on the current device; None if the tables do not fit."""
    device = _device.get()
    missing = {id(t): t for t in rows.tables.values() if (id(t), device) not in _resident}
    needed = sum(t.nbytes for t in missing.values())
    if needed > SHARE * free_memory(device):
        return None
    for key, table in missing.items():
        _resident[key, device] = table.to(device)
        weakref.finalize(table, _resident.pop, (key, device), None)
    tables = {name: _resident[id(table), device] for name, table in rows.tables.items()}
    return Rows(tables, rows.index.to(device), to_device(dict(rows.own)))


def batches(rows: Rows, positions: Sequence[Tensor | slice]) -> Iterator[Batch]:
    """The batch of each step on the current device."""
    there = rows.index.device == _device.get()
    at = _positions(positions, rows.index.device) if there else positions
    return ahead([partial(rows.batch, part) for part in at], there)


def ahead(gather: Sequence[Callable[[], Batch]], there: bool) -> Iterator[Batch]:
    """The batches that these functions gather, on the current device. If their rows are not there, one step ahead."""
    if there:
        yield from (one() for one in gather)
        return
    device = _device.get()
    with ThreadPoolExecutor(1) as thread:
        waiting = None
        for one in gather:
            following = thread.submit(_pinned, one, device.type == "cuda")
            if waiting is not None:
                yield _copied(waiting.result(), device)
            waiting = following
        if waiting is not None:
            yield _copied(waiting.result(), device)


def _positions(positions: Sequence[Tensor | slice], device: torch.device) -> Sequence[Tensor | slice]:
    """Positions of rows, copied to the device in one go."""
    tensors = [at for at in positions if isinstance(at, Tensor)]
    if device.type == "cpu" or not tensors:
        return positions
    return torch.cat(tensors).to(device).split([len(at) for at in tensors])


def _pinned(gather: Callable[[], Batch], pin: bool) -> Batch:
    batch = gather()
    return {name: column.pin_memory() for name, column in batch.items()} if pin else batch


def _copied(batch: Batch, device: torch.device) -> Batch:
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on this device; infinite if it does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if device.type == "xpu":
        return float(torch.xpu.mem_get_info(device)[0])
    return float("inf")


def total_memory(device: torch.device) -> float:
    """Bytes of memory of this device; infinite if it does not say. The width of stacks depends on it, so it must not vary."""
    if device.type == "cuda":
        return _cuda_memory(device.index or 0)
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory())
    if device.type == "xpu":
        return float(torch.xpu.get_device_properties(device).total_memory)
    return float("inf")


@cache
def _cuda_memory(index: int) -> float:
    """Asked in another process unless CUDA is in use already: a process that has started CUDA cannot fork workers."""
    if torch.cuda.is_initialized():
        return float(torch.cuda.get_device_properties(index).total_memory)
    code = f"import torch; print(torch.cuda.get_device_properties({index}).total_memory)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


class LossScale:
    """Keeps gradients in the range of float16: the loss is scaled up and gradients are scaled down again. Does nothing otherwise.

    A client whose gradient overflows takes a step with a zero gradient, and its scale is halved. After STEADY steps without an
    overflow the scale doubles. `clients` is the first dimension of stacked gradients; None: one client.
    """

    FIRST, STEADY = 2.0**16, 2000

    def __init__(self, clients: int | None = None) -> None:
        self.active = _precision.get() == torch.float16
        shape = () if clients is None else (clients,)
        if self.active:
            self._scale = torch.full(shape, self.FIRST, device=_device.get())
            self._good = torch.zeros(shape, device=_device.get())

    def up(self, losses: Tensor, part: slice = slice(None)) -> Tensor:
        """The losses as they are differentiated; `part` of the clients."""
        return losses * (self._scale[part] if self._scale.dim() else self._scale) if self.active else losses

    def down_(self, grads: Sequence[Tensor], part: slice = slice(None)) -> None:
        """Scale the gradients down in place, and adapt the scale."""
        if not self.active:
            return
        stacked = bool(self._scale.dim())
        scale = self._scale[part] if stacked else self._scale
        each = [
            g.flatten(1) if stacked and g.dim() > 1 else g.reshape(len(g), 1) if stacked else g.flatten() for g in grads
        ]
        finite = torch.stack([torch.isfinite(g).all(-1) for g in each]).all(0)
        for g in grads:
            shape = (-1, *[1] * (g.dim() - 1)) if stacked else ()
            g.mul_((1 / scale).reshape(shape))
            g.masked_fill_(~finite.reshape(shape), 0.0)
        good = torch.where(finite, self._good[part] + 1 if stacked else self._good + 1, 0.0)
        scale = torch.where(finite, torch.where(good >= self.STEADY, scale * 2, scale), scale / 2)
        good = torch.where(good >= self.STEADY, 0.0, good)
        if stacked:
            self._scale[part], self._good[part] = scale, good
        else:
            self._scale, self._good = scale, good
