"""The server's side of an engine: sites that speak when spoken to.

A site is asked who it is before it counts as here. Orders go out with the terms, for a site may hear each one in a new process.
Whose answer it is, the engine says; what the answer says of itself is only checked against that.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Collection

from kilter.errors import Mistake
from kilter.net.frames import LARGEST, Head, apart, text, together
from kilter.net.grpc_server import PROTOCOL
from kilter.net.links import Link, Links
from kilter.net.terms import Facts
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds before a site that was lost or refused is asked again


class Desk(Links):
    """`post` is the engine's: bytes to a site, whose answer goes to `heard`, or to `lost` if there will be none."""

    def __init__(self, allowed: Collection[str], largest: int = LARGEST) -> None:
        super().__init__()
        self.allowed, self.largest = allowed, largest
        self._terms: dict[str, Head] = {}
        self._asked: set[str] = set()  # who they are
        self._again: dict[str, float] = {}  # when to ask next
        self._pause: dict[str, float] = {}

    @abstractmethod
    def post(self, name: str, letter: bytes) -> None:
        """Bytes on their way to a site; returns at once; `changed` is held."""

    def send(self, name: str, head: Head, body: bytes) -> None:
        if head["kind"] == "terms":
            self._terms[name] = head
        elif name in self.links and name in self._terms:
            self.traffic["out"] += len(body)
            self.post(name, _once({**head, "terms": self._terms[name]}, body))

    def present(self, names: Collection[str]) -> None:
        """Who the engine can reach just now: newcomers are asked who they are, and who is gone is gone."""
        with self.changed:
            for name in [n for n in self.links if n not in names]:
                self._gone(name, "the engine does not reach it")
            for name in names:
                wanted = name in (self.allowed or ()) and name not in self.links and name not in self._asked
                if wanted and time.monotonic() >= self._again.get(name, 0.0):
                    self._asked.add(name)
                    self.post(name, _once({"kind": "hello"}))

    def heard(self, name: str, letter: bytes) -> None:
        """The answer of a site that the engine knows by this name."""
        with self.changed:
            try:
                head, body = apart(letter, self.largest)
                self.traffic["in"] += len(body)
                if name in self._asked:
                    self._asked.discard(name)
                    self._welcome(name, head)
                    return
                refused = self.letter(name, head, body)
            except (Malformed, Mistake) as e:
                refused = str(e)
            if refused:
                self._gone(name, refused)
            else:
                self._pause.pop(name, None)

    def lost(self, name: str, why: str) -> None:
        """There will be no answer from this site."""
        with self.changed:
            self._gone(name, why)

    def _welcome(self, name: str, head: Head) -> None:
        if head["kind"] == "refusal":
            raise Malformed(f"it does not take part: {text(head, 'why', 400)}")
        if head["kind"] != "hello" or head.get("protocol") != PROTOCOL:
            raise Malformed("it speaks another protocol: use the same version of kilter on both sides")
        said = text(head, "name", 64)
        if said != name:
            raise Malformed(f"it calls itself '{said}', and the engine does not")
        card = head.get("card")
        link = Link(name, Facts.read(head.get("facts")), card if isinstance(card, dict) else {})
        self.links[name] = link
        log.info("%s is here%s", name, " again" if name in self.left else "")
        self.arrived(link)
        self.changed.notify_all()

    def _gone(self, name: str, why: str) -> None:
        """A site is asked again later, ever more patiently until it has answered an order."""
        self._asked.discard(name)
        if self.links.pop(name, None):
            self.left[name] = time.monotonic()
        pause = self._pause.get(name, FIRST_PAUSE)
        self._again[name] = time.monotonic() + pause
        self._pause[name] = min(2 * pause, LONGEST_PAUSE)
        self.note(f"{name}: {why}")
        self.changed.notify_all()


def _once(head: Head, body: bytes = b"") -> bytes:
    """A letter like no other, so that an engine's number for it (Flower's is a digest) cannot be guessed by another site."""
    return together({**head, "nonce": secrets.token_hex(16)}, body)
