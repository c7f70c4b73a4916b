"""Choose the devices of a run by name: auto, cpu, cuda, cuda:1, mps, xpu, or several with commas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kilter.errors import Mistake
from kilter.fast import placement

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of layers
KINDS = ("cuda", "mps", "xpu")  # accelerators in order of preference


def parse(spec: str) -> tuple[torch.device, ...]:
    """The devices behind a name, checked to be there.

    >>> parse("cpu")
    (device(type='cpu'),)
    """
    if spec == "auto":
        return (best(),)
    devices = tuple(_one(word.strip()) for word in spec.split(","))
    if len({device.type for device in devices}) > 1:
        raise Mistake(
            f"--device {spec} mixes kinds of devices: results would depend on who trains where. Use one kind."
        )
    return devices


def _one(word: str) -> torch.device:
    try:
        device = torch.device(word)
    except RuntimeError:
        raise Mistake(f"'{word}' is not a device: use auto, cpu, cuda, cuda:1, mps or xpu.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    there = count(device.type)
    if not there:
        raise Mistake(f"There is no {device.type} device here: use --device cpu, or auto.")
    if device.index is not None and device.index >= there:
        raise Mistake(f"There are {there} {device.type} devices here, so '{word}' does not exist: they count from 0.")
    return torch.device(device.type, device.index or 0)


def count(kind: str) -> int:
    """How many devices of this kind there are. Asking does not start CUDA, so worker processes can still be forked."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return 0
    return int(module.device_count())


def best() -> torch.device:
    """The best device there is."""
    for kind in KINDS:
        if count(kind):
            return torch.device(kind, 0)
    return torch.device("cpu")


def describe(devices: tuple[torch.device, ...]) -> str:
    """One line for the beginning of a run; it says if an accelerator is present but unused."""
    names = ", ".join(_name(device) for device in devices)
    unused = best()
    if devices[0].type == "cpu" and unused.type != "cpu":
        return f"{names} ({_name(unused)} is present but unused: use --device auto)"
    return names


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    module = getattr(torch, device.type)
    name = module.get_device_name(device.index) if hasattr(module, "get_device_name") else ""
    return f"{device}" + (f" ({name})" if name else "")


@contextmanager
def repeatable(device: torch.device, precision: str) -> Iterator[None]:
    """Inside this block, computations use this device and precision, with algorithms that give the same bits again.

    TF32 is used only where it is asked for and only by CUDA devices; others compute in full float32.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch names operations that have no such version
        # Nobody reads uninitialised memory here, and filling it takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with placement.use(device, PRECISIONS[precision]):
        yield
