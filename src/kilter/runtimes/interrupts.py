"""Ctrl-C and SIGTERM.

Python raises an interrupt wherever the main thread happens to be. There it may break what it interrupts (torch was entering one
of its modes and fails to leave it) or be swallowed (torch's own code treats any error as "no such attribute"). So we remember the
request: later errors are attributed to it, and a round in which it was swallowed does not count.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_requested = False


@contextmanager
def stoppable(*signals: signal.Signals) -> Iterator[None]:
    """Inside this block, these signals (default SIGINT and SIGTERM) raise KeyboardInterrupt."""
    global _requested
    _requested = False
    before = {s: signal.signal(s, _request) for s in signals or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception:
        check()
        raise
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _requested = False


def check() -> None:
    """Raise KeyboardInterrupt if a stop was requested. Called after each round, before it is recorded."""
    if _requested:
        raise KeyboardInterrupt


def _request(*_: object) -> None:
    global _requested
    _requested = True
    raise KeyboardInterrupt
