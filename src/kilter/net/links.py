"""How the sites of a rotating federation reach each other: sealed packets, and who is present.

Every packet is sealed from site to site, also over direct links, with a key for this packet only: HKDF over the two sites' shared
secret, a fresh salt, and the run, both names, both processes (nonces) and the packet's number. A packet that was altered,
replayed or misdelivered does not open. `RelayLinks` sends packets through a relay, `DirectLinks` straight to their receiver.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from kilter.net.byte_budget import ByteBudget
from kilter.net.frames import LARGEST, Head, pack_letter, unpack_letter
from kilter.net.names import printable
from kilter.net.seal import Seal
from kilter.net.turns import Packet, Ready
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

WIDTH = 256  # packets that may overtake one
OVERHEAD = 32  # bytes that sealing adds: salt and tag


class Window:
    """The numbers of packets that were opened. A packet that waited may come after later ones; far older ones are refused."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen: set[int] = set()

    def add(self, number: int) -> bool:
        """Whether this number is new."""
        if number in self._seen or number <= self._highest - WIDTH:
            return False
        self._highest = max(self._highest, number)
        self._seen = {n for n in (*self._seen, number) if n > self._highest - WIDTH}
        return True


class Links(ABC):
    """`changed` guards and announces everything that other threads look at."""

    def __init__(self, run: str, seal: Seal, largest: int = LARGEST) -> None:
        self.run, self.me, self.largest = run, seal.name, largest
        self.nonce = secrets.token_hex(16)
        self.changed = threading.Condition()
        self.present: dict[str, tuple[Ready, int]] = {}  # other sites that can be reached, and by which connection
        self.left: dict[str, float] = {}  # when a site was last lost
        self.connection = 0  # mine: counts how often I was cut off
        self.online = False
        self._since = 0.0  # when I was last connected again
        self.traffic: Counter[str] = Counter()
        self.last_error = ""
        self._seal = seal
        self._number = 0
        self._early: list[tuple[Packet, bytes]] = []  # packets of sites that I do not know to be here
        self._early_budget = ByteBudget()
        self._sending = threading.Lock()
        self._opened: dict[tuple[str, str], Window] = {}  # by sender and its process
        # Called without `changed` held: a packet that was opened; that somebody came or left.
        self.on_packet: Callable[[str, Head, bytes], None] = lambda *_: None
        self.on_presence: Callable[[], None] = lambda: None

    @abstractmethod
    def post(self, packet: Packet, sealed: bytes) -> None:
        """Send a sealed packet, from any thread. It is lost if its receiver cannot be reached."""

    @abstractmethod
    def close(self) -> None:
        """Stop sending and receiving."""

    def send(self, to: str, head: Head, body: bytes = b"") -> int:
        """Seal a message for one site and send it; the bytes on the wire. A message to a site that is away is lost: 0."""
        with self._sending:  # packets leave in the order of their numbers
            with self.changed:
                there = self.present.get(to)
            if there is None:
                return 0
            self._number += 1
            packet, (ready, _) = Packet(self.run, self.me, to, self.nonce, self._number), there
            try:
                context = _context(packet, ready.nonce)
                sealed = self._seal.close_bytes(pack_letter(head, body), to, ready.card, context)
            except Malformed as e:
                self.note(str(e))
                return 0
            self.traffic["out"] += len(sealed)
            self.post(packet, sealed)
        return len(sealed)

    def receive(self, packet: Packet, sealed: bytes) -> None:
        """Open a packet and pass it on. What cannot be opened is dropped, with a line in the log."""
        if packet.to != self.me or packet.run != self.run:
            self.note(f"a packet of {packet.sender} was dropped: it is not for this site or this run")
            return
        with self.changed:
            there = self.present.get(packet.sender)
            is_early = there is None or there[0].nonce != packet.nonce  # it knows of me before I know of it
            kept = is_early and self._early_budget.admit(packet.sender, len(sealed))
            if kept:
                self._early.append((packet, sealed))
        if there is None or is_early:
            if not kept:
                self.note(f"a packet of {packet.sender} was dropped: too many came before news of it")
            return
        ready, _ = there
        key = packet.sender, ready.nonce
        try:
            letter = self._seal.open_bytes(bytes(sealed), packet.sender, ready.card, _context(packet, self.nonce))
            if not self._opened.setdefault(key, Window()).add(packet.number):
                raise Malformed(f"a letter from {packet.sender} was replayed")
            head, body = unpack_letter(letter, self.largest)
        except Malformed as e:
            self.note(str(e))
            return
        self.traffic["in"] += len(sealed)
        self.on_packet(packet.sender, head, body)

    def update(self, present: dict[str, tuple[Ready, int]]) -> None:
        """These sites can be reached now."""
        others = {name: there for name, there in present.items() if name != self.me}
        with self.changed:
            for name in self.present:
                if name not in others:
                    self.left[name] = time.monotonic()
                    log.info("%s left", name)
            for name in others:
                if name not in self.present:
                    log.info("%s is here", name)
            if not self.online:
                self.online, self._since = True, time.monotonic()
                self.connection += 1
            self.present = others
            early, self._early = self._early, []
            self._early_budget = ByteBudget()
            self.changed.notify_all()
        self.on_presence()
        for packet, sealed in early:
            self.receive(packet, sealed)

    def lost(self) -> None:
        """I am cut off: nobody can be reached, and nobody is to blame for it."""
        with self.changed:
            self.present, self.online = {}, False
            self.changed.notify_all()
        self.on_presence()

    def away(self, name: str) -> float:
        """For how many seconds a site has been away, as far as I can know; 0 if it is here."""
        with self.changed:
            if name in self.present or not self.online:
                return 0.0
            return time.monotonic() - max(self.left.get(name, 0.0), self._since)

    def connection_to(self, name: str) -> tuple[str, int, int] | None:
        """Changes when messages between us may have been lost; None if the site is away."""
        with self.changed:
            there = self.present.get(name)
            return None if there is None else (there[0].nonce, there[1], self.connection)

    def note(self, what: str) -> None:
        what = printable(what)
        log.warning("%s", what)
        self.last_error = what


def _context(packet: Packet, receiver_nonce: str) -> bytes:
    place = [packet.run, packet.sender, packet.nonce, packet.to, receiver_nonce, packet.number]
    return json.dumps(["kilter packet", *place]).encode()
