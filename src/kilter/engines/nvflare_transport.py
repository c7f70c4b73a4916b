"""Letters through calls that wait for their answer, one thread a site: for an engine that offers remote calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from typing import Any

from kilter.engines.engine_transport import EngineTransport
from kilter.net.frames import LARGEST
from kilter.net.messages import Goodbye

LOOK = 3.0  # seconds between two checks for sites to ask again
Call = Callable[[str, bytes], Any]  # a letter to a site, and its answer; raises if there is none


class CallTransport(EngineTransport):
    """`call` is the engine's: it sends a letter to the site of this name, and returns that site's answer."""

    def __init__(self, call: Call, allowed: Collection[str], largest: int = LARGEST) -> None:
        super().__init__(allowed, largest)
        self._call = call
        self._closed = threading.Event()
        self._out: dict[str, queue.SimpleQueue[bytes | None]] = {name: queue.SimpleQueue() for name in allowed}
        for name in allowed:
            threading.Thread(target=self._serve_site, args=(name,), name=f"kilter-{name}", daemon=True).start()
        threading.Thread(target=self._check_sites, name="kilter-check", daemon=True).start()

    def post(self, name: str, letter: bytes) -> None:
        self._out[name].put(letter)

    def close(self, goodbye: Goodbye | None = None) -> None:
        """Nobody waits for a goodbye: the engine ends its sites' processes with the run."""
        self._closed.set()
        for line in self._out.values():
            line.put(None)

    def _check_sites(self) -> None:
        while not self._closed.is_set():
            self.present(list(self._out))
            self._closed.wait(LOOK)

    def _serve_site(self, name: str) -> None:
        while (letter := self._out[name].get()) is not None and not self._closed.is_set():
            try:
                answer = self._call(name, letter)
                if not isinstance(answer, bytes):
                    raise TypeError("the answer is not a letter")
            except Exception as e:  # whatever the engine raises: there is no answer
                self.lost(name, f"the engine brings no answer ({type(e).__name__})")
            else:
                self.receive(name, answer)
