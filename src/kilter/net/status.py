"""What a running server or peer tells of itself: `kilter status`, and metrics for Prometheus on an optional local port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kilter.errors import Mistake
from kilter.runtimes.base import Runtime

Look = Callable[[], tuple[Collection[str], Mapping[str, int], str]]  # who is here, bytes in and out, the last error


class Board:
    """The state of a run for those who ask."""

    def __init__(self, me: str, fed: Runtime, rounds: int, look: Look) -> None:
        self.me, self.fed, self.rounds, self.look = me, fed, rounds, look
        self.done = 0
        self.failures = 0

    def see(self, record: dict[str, Any]) -> None:
        """One more round is done."""
        self.done = record["round"]
        self.failures += len(record["failures"])

    def read(self) -> dict[str, Any]:
        here, traffic, error = self.look()
        return {
            "me": self.me,
            "round": self.fed.round,
            "rounds": self.rounds,
            "finished_rounds": self.done,
            "here": [i for i in self.fed.ids if i in here],
            "away": [i for i in self.fed.ids if i not in here and i != self.me],
            "failures": self.failures,
            "last_error": error,
            "bytes_in": traffic.get("in", 0),
            "bytes_out": traffic.get("out", 0),
        }

    def text(self) -> str:
        """As Prometheus reads it."""
        found = self.read()
        lines = [
            f"kilter_round {found['round']}",
            f"kilter_rounds {found['rounds']}",
            f"kilter_finished_rounds {found['finished_rounds']}",
            f"kilter_failures_total {found['failures']}",
            f"kilter_received_bytes_total {found['bytes_in']}",
            f"kilter_sent_bytes_total {found['bytes_out']}",
            *(f'kilter_site_up{{site="{i}"}} {int(i in found["here"])}' for i in self.fed.ids if i != self.me),
        ]
        return "\n".join(lines) + "\n"

    def publish(self, address: str) -> int:
        """Serve the metrics on this address from now on; the port."""
        board = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = board.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        host, _, port = address.rpartition(":")
        try:
            server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Answer)
        except (OSError, ValueError, OverflowError) as e:
            raise Mistake(f"Metrics cannot be served on '{address}': {e}.") from None
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="kilter-metrics", daemon=True).start()
        return int(server.server_address[1])
