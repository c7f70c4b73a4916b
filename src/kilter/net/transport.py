"""Which sites are connected, and how messages reach them: what the server's runtime needs of a network, whatever carries it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilter.net.frames import Body, Head
from kilter.net.messages import Goodbye, Hello
from kilter.net.names import printable

if TYPE_CHECKING:
    from kilter.net.tls import Identity

log = logging.getLogger("kilter.net")


@dataclass(eq=False)
class ConnectedSite:
    """A site that said hello."""

    hello: Hello

    @property
    def name(self) -> str:
        return self.hello.name


@dataclass
class SiteActivity:
    """What went to a site and came from it."""

    bytes_in: int = 0
    bytes_out: int = 0
    heard: float | None = None  # when its last message came, by the monotonic clock
    answer_seconds: float | None = None  # between our last message and its answer
    _asked: float | None = None

    def sent(self, size: int) -> None:
        self.bytes_out += size
        self._asked = time.monotonic()

    def received(self, size: int) -> None:
        self.bytes_in += size
        self.heard = time.monotonic()
        if self._asked is not None:
            self.answer_seconds, self._asked = self.heard - self._asked, None


class Transport(ABC):
    """`changed` guards and announces everything that other threads look at."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.allowed: Collection[str] | None = None  # who may connect; None: everyone with a valid certificate
        self.sites: dict[str, ConnectedSite] = {}
        self.left: dict[str, float] = {}  # when a site was last lost
        self.traffic: Counter[str] = Counter()  # "in" and "out", bytes of bodies
        self.activity: defaultdict[str, SiteActivity] = defaultdict(SiteActivity)
        self.last_error = ""
        self.identity: Identity | None = None  # mine
        # The following are called in the network's thread, with `changed` held.
        self.on_arrival: Callable[[ConnectedSite], None] = lambda site: None
        self.on_message: Callable[[str, Head, Body], str | None] = lambda *_: None  # a reason to disconnect, or None
        self.rehearsal: Callable[[Hello], Head | None] = lambda hello: None  # terms for a dry run; None: not known yet
        self.status: Callable[[], dict[str, object]] = dict

    def note(self, what: str) -> None:
        """One line in the log, and the last error of the status."""
        what = printable(what)
        log.warning("%s", what)
        self.last_error = what

    @abstractmethod
    def send(self, name: str, head: Head, body: bytes) -> None:
        """Send a message to a site, if it is connected; hold `changed`."""

    def forward(self, name: str, sender: str, head: Head, body: bytes) -> bool:
        """Send a message of another site; false if too many bytes of its sender wait already. Hold `changed`."""
        self.send(name, head, body)
        return True

    def has_room(self, name: str, sender: str) -> bool:
        """Whether nothing of this sender waits to be forwarded to this site; hold `changed`."""
        return True

    @abstractmethod
    def drop(self, name: str, why: str) -> None:
        """Disconnect a site for good; hold `changed`."""

    @abstractmethod
    def close(self, goodbye: Goodbye | None = None) -> None:
        """Say goodbye to the connected sites, and close."""
