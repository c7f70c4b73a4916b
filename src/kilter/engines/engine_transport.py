"""The server's side of an engine: sites that answer when they are asked.

A site is asked who it is before it counts as connected. Orders carry the terms, because a site may hear each one in a new process.
The engine says whose answer it is; what the answer says about itself is only compared with that.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Collection

from kilter.net.frames import LARGEST, Head, pack_letter, unpack_letter
from kilter.net.messages import Hello, Refusal, kind_of
from kilter.net.transport import ConnectedSite, Transport
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds before a site that was lost or refused is asked again


class EngineTransport(Transport):
    """`post` is the engine's: bytes to a site. Its answer goes to `receive`, or to `lost` if there will be none."""

    def __init__(self, allowed: Collection[str], largest: int = LARGEST) -> None:
        super().__init__()
        self.allowed, self.largest = allowed, largest
        self._terms: dict[str, Head] = {}
        self._asked: set[str] = set()  # sites that were asked who they are
        self._next_try: dict[str, float] = {}
        self._pause: dict[str, float] = {}

    @abstractmethod
    def post(self, name: str, letter: bytes) -> None:
        """Send bytes to a site and return at once; `changed` is held."""

    def send(self, name: str, head: Head, body: bytes) -> None:
        if kind_of(head) == "terms":
            self._terms[name] = head
        elif kind_of(head) == "order" and name in self.sites and name in self._terms:
            self.traffic["out"] += len(body)
            self.post(name, _unique({**head, "terms": self._terms[name]}, body))

    def drop(self, name: str, why: str) -> None:
        self._disconnect(name, why)

    def present(self, names: Collection[str]) -> None:
        """The sites that the engine can reach now: new ones are asked who they are, missing ones are disconnected."""
        with self.changed:
            for name in [n for n in self.sites if n not in names]:
                self._disconnect(name, "the engine does not reach it")
            for name in names:
                wanted = name in (self.allowed or ()) and name not in self.sites and name not in self._asked
                if wanted and time.monotonic() >= self._next_try.get(name, 0.0):
                    self._asked.add(name)
                    self.post(name, _unique({"kind": "hello"}))

    def receive(self, name: str, letter: bytes) -> None:
        """The answer of the site that the engine knows by this name."""
        with self.changed:
            try:
                head, body = unpack_letter(letter, self.largest)
                self.traffic["in"] += len(body)
                if name in self._asked:
                    self._asked.discard(name)
                    self._welcome(name, head)
                    return
                refused = self.on_message(name, head, body)
            except Malformed as e:
                refused = str(e)
            if refused:
                self._disconnect(name, refused)
            else:
                self._pause.pop(name, None)

    def lost(self, name: str, why: str) -> None:
        """There will be no answer from this site."""
        with self.changed:
            self._disconnect(name, why)

    def _welcome(self, name: str, head: Head) -> None:
        if kind_of(head) == "refusal":
            raise Malformed(f"it does not take part: {Refusal.parse(head).why}")
        hello = Hello.parse(head)
        if hello.name != name:
            raise Malformed(f"it calls itself '{hello.name}', and the engine does not")
        site = ConnectedSite(hello)
        self.sites[name] = site
        log.info("%s is here%s", name, " again" if name in self.left else "")
        self.on_arrival(site)
        self.changed.notify_all()

    def _disconnect(self, name: str, why: str) -> None:
        """The site is asked again later, with growing pauses until it has answered an order."""
        self._asked.discard(name)
        if self.sites.pop(name, None):
            self.left[name] = time.monotonic()
        pause = self._pause.get(name, FIRST_PAUSE)
        self._next_try[name] = time.monotonic() + pause
        self._pause[name] = min(2 * pause, LONGEST_PAUSE)
        self.note(f"{name}: {why}")
        self.changed.notify_all()


def _unique(head: Head, body: bytes = b"") -> bytes:
    """A letter unlike any other, so that another site cannot guess an engine's id for it (Flower's is a digest)."""
    return pack_letter({**head, "nonce": secrets.token_hex(16)}, body)
