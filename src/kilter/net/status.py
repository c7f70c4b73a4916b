"""What a running server or peer says about itself: `kilter status`, and metrics for Prometheus on an optional local port."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from kilter.errors import Mistake
from kilter.net.ports import cannot_listen, split_address
from kilter.net.tls import Identity, is_loopback
from kilter.net.transport import SiteActivity
from kilter.records.types import Round
from kilter.runtimes.base import Runtime

MOST_REQUESTS = 8  # metrics requests that are answered at the same time; more are turned away
REQUEST_SECONDS = 5.0  # within which a request must be complete
Snapshot = tuple[Collection[str], Mapping[str, int], str]  # who is connected, bytes in and out, the last error
NO_ACTIVITY: Mapping[str, SiteActivity] = {}


class StatusBoard:
    """The state of a run, for `kilter status` and Prometheus."""

    def __init__(
        self,
        me: str,
        fed: Runtime,
        rounds: int,
        snapshot: Callable[[], Snapshot],
        activity: Mapping[str, SiteActivity] = NO_ACTIVITY,
        identity: Identity | None = None,
    ) -> None:
        self.me, self.fed, self.rounds, self.snapshot, self.activity = me, fed, rounds, snapshot, activity
        self.identity = identity
        self.done = 0
        self.failures = 0
        self.failed: Counter[str] = Counter()  # calls by site

    def see(self, record: Round) -> None:
        """Another round is done."""
        self.done = record.round
        self.failures += len(record.failures)
        self.failed.update(failure.node for failure in record.failures)

    def read(self) -> dict[str, Any]:
        here, traffic, error = self.snapshot()
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
            "certificate_days": self._days_left(),
        }

    def _days_left(self) -> float | None:
        """Days until my certificate expires."""
        left = self.identity.days_left() if self.identity else None
        return None if left is None else round(left, 1)

    def with_sites(self) -> dict[str, Any]:
        """The status and, of every site: whether it is connected, when it was last heard, what it cost. For the dashboard."""
        status = self.read()
        sites = {}
        for name in (i for i in self.fed.ids if i != self.me):
            seen = self.activity.get(name, SiteActivity())
            sites[name] = {
                "connected": name in status["here"],
                "last_message": None if seen.heard is None else time.monotonic() - seen.heard,
                "answer_seconds": seen.answer_seconds,
                "failures": self.failed[name],
                "bytes_in": seen.bytes_in,
                "bytes_out": seen.bytes_out,
            }
        return {**status, "sites": sites}

    def text(self) -> str:
        """In the format of Prometheus."""
        status = self.read()
        lines = [
            f"kilter_round {status['round']}",
            f"kilter_rounds {status['rounds']}",
            f"kilter_finished_rounds {status['finished_rounds']}",
            f"kilter_failures_total {status['failures']}",
            f"kilter_received_bytes_total {status['bytes_in']}",
            f"kilter_sent_bytes_total {status['bytes_out']}",
            *([] if status["certificate_days"] is None else [f"kilter_certificate_days {status['certificate_days']}"]),
            *(f'kilter_site_up{{site="{i}"}} {int(i in status["here"])}' for i in self.fed.ids if i != self.me),
        ]
        return "\n".join(lines) + "\n"

    def publish(self, address: str) -> int:
        """Serve the metrics on this address from now on; the port. Loopback only: the port has no authentication."""
        host, port = split_address(address)
        if not is_loopback(f"{host}:{port}"):
            raise Mistake(
                f"--metrics works on this machine only (127.0.0.1), not on '{address}': let Prometheus reach it by a proxy."
            )
        try:
            server = MetricsServer((host, port), self.text)
        except (OSError, OverflowError) as e:
            raise cannot_listen(address, str(e)) from None
        threading.Thread(target=server.serve_forever, name="kilter-metrics", daemon=True).start()
        return int(server.server_address[1])


class MetricsServer(HTTPServer):
    """Answers at most MOST_REQUESTS at a time, each for REQUEST_SECONDS at most; the others are turned away at once."""

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        self.text = text
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, MetricsRequest)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        timer = threading.Timer(REQUEST_SECONDS, _hang_up, [request])  # also for a request that drips byte by byte
        timer.daemon = True
        timer.start()
        try:
            with suppress(OSError):  # the client is gone
                self.finish_request(request, client_address)
        finally:
            timer.cancel()
            self.shutdown_request(request)
            self._free.release()


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class MetricsRequest(BaseHTTPRequestHandler):
    """GET: the metrics."""

    server: MetricsServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
