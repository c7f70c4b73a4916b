"""The thread that carries out orders: the newest one that waits, and never one of a lower turn."""

from __future__ import annotations

from typing import Any

from kilter.net.order_worker import OrderWorker
from kilter.net.turns import Turn


class Recorder:
    """Stands for a site, and remembers what it was asked."""

    leader = ""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def carry_out(self, order: Any, body: bytes) -> tuple[str, bytes]:
        self.orders.append(order)
        return f"reply to {order}", body


def test_an_order_of_a_lower_turn_is_dropped() -> None:
    """A leader that was given up asks itself, after a successor has asked."""
    site, answers = Recorder(), list[tuple[Any, ...]]()

    def answer(*reply: Any) -> None:
        answers.append(reply)
        worker.stop()

    worker: Any = OrderWorker(site, answer)  # type: ignore[arg-type]
    worker.put("b", Turn(2, 0), "first", b"")
    worker.put("c", Turn(2, 1), "second", b"")
    worker.put("b", Turn(2, 0), "stale", b"")
    worker.run()
    assert site.orders == ["second"]
    assert answers == [("c", "reply to second", b"")]
    assert site.leader == "c"
