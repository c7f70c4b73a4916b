"""Hand-overs that arrived at a site and wait to be taken: at most one of each sender."""

from __future__ import annotations

import threading

from kilter.net.turns import Turn, TurnMessage


class HandOverInbox:
    """Keeps the last books and the last hand-over of each sender, so that no site can overwrite those of another."""

    def __init__(self) -> None:
        self._books: dict[str, tuple[Turn, bytes]] = {}
        self._waiting: dict[str, tuple[TurnMessage, bytes]] = {}
        self._lock = threading.Lock()

    def put_books(self, sender: str, turn: Turn, body: bytes) -> None:
        with self._lock:
            self._books[sender] = turn, body

    def put(self, sender: str, message: TurnMessage, body: bytes) -> None:
        with self._lock:
            self._waiting[sender] = message, body

    def take(self) -> tuple[str, TurnMessage, bytes, bytes] | None:
        """A sender, its hand-over, its books and the body of the hand-over; None if nothing waits."""
        with self._lock:
            if not self._waiting:
                return None
            sender = next(iter(self._waiting))
            message, body = self._waiting.pop(sender)
            turn, books = self._books.pop(sender, (message.turn, b""))
            return sender, message, books if turn == message.turn else b"", body
