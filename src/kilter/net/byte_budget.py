"""A bound on what waits in a queue: bytes per name, so that one site can fill only its own share."""

from __future__ import annotations

import threading
from collections import Counter

WAITING_BYTES = 2**26  # bytes of one site that may wait in a queue
PER_ITEM = 2**10  # bytes that every item costs, however small


class ByteBudget:
    """Counts the bytes that wait, by name. One item of any size may wait alone: a model can be larger than the bound.

    >>> budget = ByteBudget(10_000)
    >>> [budget.admit("a", 50_000), budget.admit("a", 1), budget.admit("b", 6000), budget.admit("b", 6000)]
    [True, False, True, False]
    """

    def __init__(self, most: int = WAITING_BYTES) -> None:
        self._most = most
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def admit(self, name: str, size: int) -> bool:
        """Count an item of this size, unless it would exceed the bound; whether it may wait."""
        with self._lock:
            waiting = self._waiting[name]
            if waiting and waiting + size + PER_ITEM > self._most:
                return False
            self._waiting[name] += size + PER_ITEM
            return True

    def release(self, name: str, size: int) -> None:
        """An item that was admitted waits no longer."""
        with self._lock:
            self._waiting[name] -= size + PER_ITEM
            if self._waiting[name] <= 0:
                del self._waiting[name]

    def is_empty(self, name: str) -> bool:
        """Whether nothing of this name waits: what was refused can be sent again."""
        with self._lock:
            return not self._waiting[name]
