"""A device that exists only in Python, to test device handling on a machine without an accelerator.

A tensor on the device `mock` computes on the CPU. As on a GPU, an operation that mixes it with a CPU tensor (other than a number)
is refused. Copies from the device to the host are counted: `transfers.to_host`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as tree
from torch.utils import backend_registration

NAME = "mock"
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
FACTORY_KEYS = ("device", "pin_memory")


@dataclass
class Transfers:
    to_host: int = 0
    to_device: int = 0


transfers = Transfers()


def is_device(value: Any) -> bool:
    return value is not None and torch.device(value).type == NAME


class MockTensor(torch.Tensor):
    """A tensor on the mock device. `on_cpu` holds its numbers."""

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor, requires_grad: bool = False) -> MockTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )

    def __init__(self, on_cpu: torch.Tensor, requires_grad: bool = False) -> None:
        self.on_cpu = on_cpu

    def __repr__(self) -> str:
        return f"MockTensor({self.on_cpu!r})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, args, dict(kwargs or {}))


def compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation, on the CPU."""
    leaves = tree.tree_leaves((args, kwargs))
    tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
    mock = [t for t in tensors if isinstance(t, MockTensor)]
    if op not in COPIES and mock and any(not isinstance(t, MockTensor) and t.dim() for t in tensors):
        raise RuntimeError(f"{op} mixes the devices cpu and {NAME}")
    target = kwargs.get("device")
    if op is torch.ops.aten.copy_.default:
        return _copy_into(*args)
    if op is torch.ops.aten._local_scalar_dense.default:
        transfers.to_host += 1
        return op(args[0].on_cpu)
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    out = op(*tree.tree_map(bare, args), **{k: tree.tree_map(bare, v) for k, v in kwargs.items()})
    if op is torch.ops.aten._to_copy.default and target is not None and not is_device(target):
        transfers.to_host += 1
        return out
    if op is torch.ops.aten._to_copy.default and not mock:
        transfers.to_device += 1
    known = {id(t.on_cpu): t for t in mock}  # what an operation returns in place is the same object
    return tree.tree_map(lambda a: _wrapped(a, known), out)


def _wrapped(value: Any, known: dict[int, MockTensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return known[id(value)] if id(value) in known else MockTensor(value)


def _copy_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(source, MockTensor) and not isinstance(target, MockTensor):
        transfers.to_host += 1
        return target.copy_(source.on_cpu)
    if not isinstance(source, MockTensor):
        transfers.to_device += 1
    target.on_cpu.copy_(bare(source))
    return target


def bare(value: Any) -> Any:
    return value.on_cpu if isinstance(value, MockTensor) else value


def register() -> None:
    """Make `mock` a device of torch, once per process."""
    if getattr(torch, NAME, None) is not None:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    global _library
    _library = torch.library.Library("_", "IMPL")

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(op, args, kwargs)

    _library.fallback(fallback, "PrivateUse1")
