"""Flower's grid without Flower: nodes that answer a message as a ClientApp would, each time as if in a new process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace as Thing
from typing import Any

from place import Place

from kilter.engines.settings import make_site
from kilter.engines.site_endpoint import answer_letter


def envelope(letter: bytes, node: int, seconds: float) -> Any:
    return Thing(letter=letter, node=node, ttl=seconds)


class FakeGrid:
    """`meddle(name, count, reply)` may change the reply to a node's message of this number."""

    def __init__(self, here: Place, tls: bool = False, meddle: Callable[[str, int, Any], Any] | None = None) -> None:
        self.here, self.tls, self.meddle = here, tls, meddle
        self.nodes = {name: 100 + k for k, name in enumerate(here.sites)}
        self.since = dict.fromkeys(here.sites, "monday")
        self.calls: Counter[str] = Counter()
        self.settings: dict[str, dict[str, Any]] = {name: {} for name in here.sites}
        self._ready: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._hands = ThreadPoolExecutor(len(here.sites))

    def get_nodes(self) -> list[Any]:
        return [Thing(name=n, node_id=k, last_activated_at=self.since[n]) for n, k in self.nodes.items()]

    def push_messages(self, messages: list[Any]) -> list[str]:
        made = []
        for message in messages:
            (name,) = [n for n, k in self.nodes.items() if k == message.node]
            self.calls[name] += 1
            made.append(f"{name}#{self.calls[name]}")
            self._hands.submit(self._work, name, made[-1], self.calls[name], message.letter)
        return made

    def _work(self, name: str, number: str, count: int, letter: bytes) -> None:
        said = self.visit(name, letter)
        reply = Thing(
            metadata=Thing(reply_to_message_id=number, src_node_id=self.nodes[name]),
            has_error=lambda: False,
            content={"letter": {"bytes": Thing(data=said)}},
        )
        if self.meddle:
            reply = self.meddle(name, count, reply)
        with self._lock:
            if reply is not None:
                self._ready[number] = reply

    def visit(self, name: str, letter: bytes) -> bytes:
        folder = self.here.folder
        settings = {
            "data": folder / f"{name}.npz",
            "state-dir": folder / f"state-{name}",
            "policy": folder / "site.toml",
        }
        settings |= self.settings[name]
        if self.tls:
            settings["tls"] = folder / "certs" / name
        site = make_site(settings, str(settings.pop("name", name)))
        said = answer_letter(site, letter)
        site.close()
        return said

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        with self._lock:
            return [self._ready.pop(n) for n in list(self._ready) if n in numbers]
