"""The switch for everything in this package. `--plain` and `Simulation(plain=True)` turn all of it off."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kilter.fast import placement

log = logging.getLogger("kilter")

_plain: ContextVar[bool] = ContextVar("plain", default=False)
_reported: set[str] = set()
_untaken: dict[str, None] = {}  # an ordered set


def enabled() -> bool:
    """Whether accelerated code may run."""
    return not _plain.get()


def cpu_layout() -> bool:
    """Whether the memory layout that is fastest on the CPU may be used."""
    return enabled() and placement.on_cpu()


def cpu_kernels() -> bool:
    """Whether the float32 techniques for the CPU may be used: special kernels and tapes."""
    return cpu_layout() and not placement.is_mixed_precision()


@contextmanager
def plain(on: bool = True) -> Iterator[None]:
    """Compute everything inside this block with torch's own functions, one client after another."""
    token = _plain.set(on)
    try:
        yield
    finally:
        _plain.reset(token)


def report_once(consequence: str, reason: str) -> None:
    """Log a warning the first time an acceleration is not available. Every time, a run takes it into its record."""
    _untaken[consequence] = None
    if consequence not in _reported:
        _reported.add(consequence)
        log.warning("%s, which is slower (%s)", consequence, reason)


def take_reports() -> list[str]:
    """What was reported since the last call."""
    reports = list(_untaken)
    _untaken.clear()
    return reports


def forget_reports() -> None:
    """Let every warning be logged again."""
    _reported.clear()
    _untaken.clear()
