"""Who is here and how letters pass: what the runtime at the server needs of a network, whatever carries it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kilter.net.frames import Head
from kilter.net.terms import Facts

log = logging.getLogger("kilter.net")


@dataclass(eq=False)
class Link:
    """One site that is here."""

    name: str
    facts: Facts
    card: dict[str, Any]  # its public key for sealed letters, with its certificate


class Links(ABC):
    """`changed` guards and announces everything that others look at."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.allowed: Collection[str] | None = None  # who may come; None: everyone the network lets in
        self.links: dict[str, Link] = {}
        self.left: dict[str, float] = {}  # when a site was last lost
        self.traffic: Counter[str] = Counter()  # "in" and "out", bytes of bodies
        self.last_error = ""
        self.arrived: Callable[[Link], None] = lambda link: None  # called in the network's thread, `changed` held
        self.letter: Callable[[str, Head, bytes], str | None] = lambda *_: None  # likewise; a reason to part
        self.status: Callable[[], dict[str, Any]] = dict  # told to whoever may ask

    def note(self, what: str) -> None:
        """One line in the log, and the last error of the status."""
        log.warning("%s", what)
        self.last_error = what

    @abstractmethod
    def send(self, name: str, head: Head, body: bytes) -> None:
        """A letter to a site, if it is here; hold `changed`."""

    @abstractmethod
    def close(self, goodbye: Head | None = None) -> None:
        """Say goodbye to those who are here, and shut."""
