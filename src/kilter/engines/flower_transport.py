"""Letters through Flower's grid: a thread pushes and pulls its messages, and matches replies by the message they answer."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from kilter.engines.engine_transport import EngineTransport
from kilter.errors import Mistake
from kilter.net.frames import LARGEST
from kilter.net.messages import Goodbye
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

POLL = 0.2  # seconds between two checks for replies
LOOK = 3.0  # seconds between two checks of who is online
Envelope = Callable[[bytes, int, float], Any]  # a message of Flower: a letter, to a node, valid so many seconds


class FlowerTransport(EngineTransport):
    """`grid` is Flower's. A site's name is the one that its node is registered under."""

    def __init__(
        self, grid: Any, envelope: Envelope, allowed: Collection[str], deadline: float, largest: int = LARGEST
    ) -> None:
        super().__init__(allowed, largest)
        self._grid, self._envelope, self._deadline = grid, envelope, deadline
        self._nodes: dict[str, tuple[int, str]] = {}  # who is online: its node, and since when
        self._out: list[tuple[str, bytes]] = []
        self._open: dict[str, tuple[str, int]] = {}  # by message id: who was asked, and its node
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kilter-grid", daemon=True)
        self._thread.start()

    def post(self, name: str, letter: bytes) -> None:
        self._out.append((name, letter))
        self.changed.notify_all()

    def close(self, goodbye: Goodbye | None = None) -> None:
        """Nobody waits for a goodbye: a ClientApp ends with its answer."""
        self._closed.set()
        self._thread.join(30)

    # In the grid's thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        checked = -LOOK
        while not self._closed.is_set():
            try:
                if time.monotonic() - checked >= LOOK:
                    self._check_nodes()
                    checked = time.monotonic()
                self._push()
                self._pull()
            except Exception as e:  # the SuperLink may come back; deadlines decide what is lost
                log.warning("the SuperLink does not answer: %s", type(e).__name__, exc_info=e)
                self._closed.wait(LOOK)
            with self.changed:
                if not self._out:
                    self.changed.wait(POLL)

    def _check_nodes(self) -> None:
        """Who is online, by registered name."""
        online = [(node.name, (node.node_id, node.last_activated_at)) for node in self._grid.get_nodes()]
        for name, count in Counter(name for name, _ in online).items():
            if count > 1 and name in (self.allowed or ()):
                raise Mistake(f"Two SuperNodes are registered as '{name}': unregister one.")
        nodes = dict(online)
        for name, node in self._nodes.items():
            if name in self.sites and nodes.get(name, node) != node:  # it does not know what it was asked before
                self._open = {number: one for number, one in self._open.items() if one[0] != name}
                self.lost(name, "its SuperNode was started again")
        self._nodes = nodes
        self.present([name for name in nodes if name])

    def _push(self) -> None:
        with self.changed:
            out, self._out = self._out, []
        for name, letter in out:
            if name not in self._nodes:
                self.lost(name, "it is not online")
                continue
            node, _ = self._nodes[name]
            # A reply counts only until the deadline; an order that nobody fetched by then is not carried out any more.
            message = self._envelope(letter, node, self._deadline + LOOK)
            (number,) = list(self._grid.push_messages([message])) or [None]
            if number:
                self._open[number] = name, node
            else:
                self.lost(name, "the SuperLink does not take its message")

    def _pull(self) -> None:
        if not self._open:
            return
        for reply in self._grid.pull_messages(list(self._open)):
            name, node = self._open.pop(reply.metadata.reply_to_message_id, ("", 0))
            if not name:
                self.note("a reply to no message of ours was ignored")
            elif reply.has_error():
                self.lost(name, f"Flower gives no reply (error {reply.error.code})")
            elif reply.metadata.src_node_id != node:
                self.lost(name, "another node replied in its place")
            else:
                try:
                    self.receive(name, letter_in(reply.content))
                except Malformed as e:
                    self.lost(name, str(e))


def letter_in(content: Any) -> bytes:
    """The letter in a message of Flower."""
    try:
        data = content["letter"]["bytes"].data
    except (KeyError, TypeError, AttributeError):
        data = None
    if not isinstance(data, bytes):
        raise Malformed("a message of Flower holds no letter of ours")
    return data
