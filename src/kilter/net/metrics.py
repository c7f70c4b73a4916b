"""Metrics, health and readiness over HTTP: what Prometheus, Kubernetes and load balancers ask for.

`/metrics` may need a token; `/healthz` (the process works) and `/readyz` (it can do its job now; 503 and a reason otherwise) say
nothing that is secret. The port answers few requests at a time, each for a few seconds at most. Without TLS and a token it opens on
this machine only. Imports nothing heavy: hubs and agents use it, too.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kilter.errors import Mistake
from kilter.net.ports import cannot_listen, split_address
from kilter.net.tls import is_loopback

MOST_REQUESTS = 8  # requests that are answered at the same time; more are turned away
REQUEST_SECONDS = 5.0  # within which a request must be complete
MOST_LABELS = 1000  # values of a metric, for example one for each site; the others are left out


@dataclass(frozen=True)
class MetricName:
    """A metric that a process offers: one value, or one for each value of a label."""

    name: str  # without _total, which Prometheus adds to counters
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    label: str = ""

    @property
    def sample(self) -> str:
        """Its name in queries."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


Values = Mapping[MetricName, float | Mapping[str, float] | None]  # None: not known now


class RunMetrics(Collector):
    """Reads values when Prometheus asks for them."""

    def __init__(self, read: Callable[[], Values]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        for metric, value in self._read().items():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if isinstance(value, Mapping):
                labelled = family(metric.name, metric.help, labels=[metric.label])
                for label, each in list(value.items())[:MOST_LABELS]:
                    labelled.add_metric([label], each)
                yield labelled
            elif value is not None:
                yield family(metric.name, metric.help, value=value)


def exposition(read: Callable[[], Values]) -> bytes:
    """The values in the format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunMetrics(read))
    return generate_latest(registry)


@dataclass(frozen=True)
class MetricsPort:
    """Where to serve metrics, and who may read them."""

    address: str  # HOST:PORT
    tls: Path | None = None  # folder with key.pem and cert.pem
    token: Path | None = None  # file with the token that a request must carry

    def check(self) -> None:
        split_address(self.address)
        if not is_loopback(self.address) and (self.tls is None or self.token is None):
            raise Mistake(
                f"Metrics are served on this machine only (127.0.0.1), not on '{self.address}': for other machines give "
                "metrics-tls and metrics-token, too."
            )


def publish(port: MetricsPort, read: Callable[[], Values], unready: Callable[[], str] = lambda: "") -> int:
    """Serve metrics and health checks from now on; the port. `unready` says why the process cannot do its job now, or nothing."""
    port.check()
    host, number = split_address(port.address)
    token = _token(port.token) if port.token else ""
    try:
        server = MetricsServer((host, number), lambda: exposition(read), unready, token)
    except (OSError, OverflowError) as e:
        raise cannot_listen(port.address, str(e)) from None
    if port.tls is not None:
        server.wrap(port.tls)
    threading.Thread(target=server.serve_forever, name="kilter-metrics", daemon=True).start()
    return int(server.server_address[1])


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it is not text"
        raise Mistake(f"The token in '{path}' cannot be read: {why}.") from None
    if len(token) < 16:
        raise Mistake(f"The token in '{path}' is too short: use at least 16 characters.")
    return token


class MetricsServer(HTTPServer):
    """Answers at most MOST_REQUESTS at a time, each for REQUEST_SECONDS at most; the others are turned away at once."""

    def __init__(
        self, address: tuple[str, int], text: Callable[[], bytes], unready: Callable[[], str], token: str = ""
    ) -> None:
        self.text, self.unready, self.token = text, unready, token
        self._context: ssl.SSLContext | None = None
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, MetricsRequest)

    def wrap(self, folder: Path) -> None:
        """Use TLS with the certificate of a folder."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        except (OSError, ssl.SSLError) as e:
            self.server_close()
            raise Mistake(f"--metrics-tls '{folder}' must hold key.pem and cert.pem that fit: {e}.") from None
        self._context = context

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()

    def _answer(self, request: socket.socket, client_address: object) -> None:
        timer = threading.Timer(REQUEST_SECONDS, _hang_up, [request])  # also for a request that drips byte by byte
        timer.daemon = True
        timer.start()
        try:
            with suppress(OSError):  # the client is gone, or does not speak TLS
                if self._context is not None:
                    request = self._context.wrap_socket(request, server_side=True)
                self.finish_request(request, client_address)
        finally:
            timer.cancel()
            self.shutdown_request(request)
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A broken request is the client's problem."""


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class MetricsRequest(BaseHTTPRequestHandler):
    """GET /metrics, /healthz or /readyz."""

    server: MetricsServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._reply(200, b"ok\n")
        elif path == "/readyz":
            why = self.server.unready()
            self._reply(503 if why else 200, f"{why or 'ready'}\n".encode())
        elif path not in ("/", "/metrics"):
            self._reply(404, b"There are /metrics, /healthz and /readyz.\n")
        elif not self._knows_token():
            self._reply(401, b"This needs a token: Authorization: Bearer TOKEN.\n")
        else:
            self._reply(200, self.server.text(), CONTENT_TYPE_LATEST)

    def _knows_token(self) -> bool:
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return not self.server.token or hmac.compare_digest(sent.encode(), self.server.token.encode())

    def _reply(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
