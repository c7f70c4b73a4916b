"""Runs and studies of a folder, live in a browser. Listens on this machine only by default; a token guards every request."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from kilter.errors import Mistake
from kilter.report.html_report import SCRIPTS, data_of, render
from kilter.report.page_data import collect
from kilter.report.run_list import RunList

LOOK_SECONDS = 0.5  # between two looks at the files
MOST_STREAMS = 16  # browsers that watch at the same time
MOST_COMPARED = 50  # folders in one comparison
Status = Callable[[], dict[str, object]]


class Dashboard(ThreadingHTTPServer):
    """Serves the page, the list of runs, changes to it, and comparisons."""

    daemon_threads = True

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 0, status: Status | None = None) -> None:
        self.root = root.resolve()
        self.token = secrets.token_urlsafe(24)
        self.status = status
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._list = RunList(self.root)
        self._lock = threading.Lock()
        self._looked = 0.0
        self._state: dict[str, object] = {}
        try:
            super().__init__((host, port), Request)
        except (OSError, OverflowError) as e:
            raise Mistake(f"The dashboard cannot listen on {host}:{port}: {e}.") from None

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        shown = host.decode() if isinstance(host, bytes) else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={self.token}"

    def state(self) -> dict[str, object]:
        """The list of runs and, for a server of real sites, its status. Looks at the files at most once in LOOK_SECONDS."""
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_SECONDS or not self._state:
                entries = [asdict(entry) for entry in self._list.look()]
                self._state = {"entries": entries, "status": self.status() if self.status else None}
                self._looked = time.monotonic()
            return self._state

    def comparison(self, names: list[str]) -> bytes:
        """The data of a report on these folders, which must lie below the dashboard's."""
        if not 0 < len(names) <= MOST_COMPARED:
            raise Mistake(f"Choose between 1 and {MOST_COMPARED} runs or studies.")
        folders = [(self.root / name).resolve() for name in names]
        if any(not f.is_relative_to(self.root) for f in folders):
            raise Mistake("Only folders below the dashboard's own can be shown.")
        if any(not f.is_dir() for f in folders):
            raise Mistake("A run that was chosen is not there any more.")
        return msgspec.json.encode(data_of(collect(folders)), enc_hook=str)


class Request(BaseHTTPRequestHandler):
    """GET only; every request needs the token."""

    server: Dashboard
    timeout = 30

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not hmac.compare_digest(query.get("token", [""])[0].encode(), self.server.token.encode()):
            self._send(
                HTTPStatus.FORBIDDEN, b"The address lacks the token that `kilter dashboard` printed.", "text/plain"
            )
            return
        try:
            if url.path == "/":
                page = render("dashboard.html", f"Runs in {self.server.root}", {}, (*SCRIPTS, "dashboard.js"))
                self._send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
            elif url.path == "/state":
                self._send(HTTPStatus.OK, json.dumps(self.server.state()).encode(), "application/json")
            elif url.path == "/events":
                self._stream()
            elif url.path == "/compare":
                self._send(HTTPStatus.OK, self.server.comparison(query.get("folder", [])), "application/json")
            else:
                self._send(HTTPStatus.NOT_FOUND, b"There is no such page.", "text/plain")
        except Mistake as e:
            self._send(HTTPStatus.CONFLICT, str(e).encode(), "text/plain; charset=utf-8")

    def _stream(self) -> None:
        """Server-sent events: the whole state first, then entries that changed or went away."""
        if not self.server.streams.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"Too many browsers watch this dashboard.", "text/plain")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            known: dict[str, object] = {}
            first = True
            while True:
                state = self.server.state()
                entries = state["entries"]
                assert isinstance(entries, list)
                now = {str(e["folder"]): e for e in entries}
                changed = [e for name, e in now.items() if known.get(name) != e]
                gone = [name for name in known if name not in now]
                if changed or gone or first or state["status"]:
                    event = {"changed": changed, "gone": gone, "status": state["status"]}
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                else:
                    self.wfile.write(b": nothing new\n\n")  # a closed connection shows when we write
                self.wfile.flush()
                known, first = dict(now), False
                time.sleep(LOOK_SECONDS)
        except OSError:
            return  # the browser has gone
        finally:
            self.server.streams.release()

    def _send(self, code: HTTPStatus, body: bytes, kind: str) -> None:
        with suppress(OSError):
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve_in_background(dashboard: Dashboard) -> None:
    """Serve in a thread until the program ends."""
    threading.Thread(target=dashboard.serve_forever, name="kilter-dashboard", daemon=True).start()


def address_of(text: str) -> tuple[str, int]:
    """Split HOST:PORT; a port alone means this machine."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise Mistake(f"'{text}' is not an address: write HOST:PORT or a port, such as 127.0.0.1:8080.")
    host = host.strip("[]") or "127.0.0.1"
    with suppress(OSError):
        socket.getaddrinfo(host, int(port))
        return host, int(port)
    raise Mistake(f"'{host}' is not a host this machine knows.")
