"""The thread in which a site carries out the orders of the site whose turn it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kilter.net.messages import Order, Reply
from kilter.net.site import Site
from kilter.net.turns import NOBODY, Turn


class OrderWorker:
    """Carries out orders one by one; of several that wait, only the newest. `answer` gets the leader's name and the reply.

    An order of a lower turn than one before is dropped, whoever gave it: it would undo what was done in the higher turn.
    """

    def __init__(self, site: Site, answer: Callable[[str, Reply, bytes], None]) -> None:
        self._site, self._answer = site, answer
        self._turn, self._lock = NOBODY, threading.Lock()  # the highest turn of an order so far
        self._orders: queue.Queue[tuple[str, Order, bytes] | None] = queue.Queue()

    def put(self, leader: str, turn: Turn, order: Order, body: bytes) -> None:
        """Carry out an order of the leader of this turn, unless a newer one comes first."""
        with self._lock:
            if turn >= self._turn:
                self._turn = turn
                self._orders.put((leader, order, body))

    def stop(self) -> None:
        self._orders.put(None)

    def run(self) -> None:
        """Until `stop`."""
        while (item := self._orders.get()) is not None:
            while not self._orders.empty():
                newer = self._orders.get_nowait()
                if newer is None:
                    return
                item = newer
            leader, order, body = item
            self._site.leader = leader
            self._answer(leader, *self._site.carry_out(order, body))
