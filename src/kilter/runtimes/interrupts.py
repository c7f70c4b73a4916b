"""Ctrl-C and SIGTERM.

An interrupt is raised wherever the main thread happens to be. There it may break what it interrupts (torch was entering one of its
modes, and fails to leave it) or be swallowed (torch's own code asked an object for an attribute, and takes any error for a no). So
that one was asked for is kept in mind: other errors are then its doing, and a round it was swallowed in does not count.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_asked = False


@contextmanager
def stoppable(*signals: signal.Signals) -> Iterator[None]:
    """Within, these signals (SIGINT and SIGTERM unless told) end the work with a KeyboardInterrupt."""
    global _asked
    _asked = False
    before = {s: signal.signal(s, _ask) for s in signals or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception:
        check()
        raise
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _asked = False


def check() -> None:
    """Stop now if it was asked for: called when a round is over and before it is written down."""
    if _asked:
        raise KeyboardInterrupt


def _ask(*_: Any) -> None:
    global _asked
    _asked = True
    raise KeyboardInterrupt
