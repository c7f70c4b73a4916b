"""The metrics port: bounded, local, and unimpressed by half-open requests."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request

import pytest

from kilter.errors import Mistake
from kilter.net import status
from kilter.net.ports import split_address
from kilter.net.status import MOST_REQUESTS, StatusBoard
from kilter.runtimes.base import Runtime
from small import federation


@pytest.fixture
def board() -> StatusBoard:
    fed: Runtime = federation()
    return StatusBoard("server", fed, 3, lambda: (["c1"], {"in": 5}, ""))


@pytest.mark.slow
def test_half_open_requests_hold_neither_threads_nor_the_port(
    board: StatusBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 12: 300 half-open requests held 300 threads."""
    monkeypatch.setattr(status, "REQUEST_SECONDS", 0.5)
    port = board.publish("127.0.0.1:0")
    before = threading.active_count()
    half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for one in half_open:
        one.send(b"GET /metrics HTTP/1.1\r\n")
    time.sleep(0.3)
    assert threading.active_count() - before <= 2 * MOST_REQUESTS + 2
    time.sleep(1.0)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    assert "kilter_rounds 3" in text
    for one in half_open:
        one.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:9000", "[::]:0", "example.org:80"])
def test_metrics_are_for_this_machine_only(board: StatusBoard, address: str) -> None:
    with pytest.raises(Mistake, match="this machine only"):
        board.publish(address)


@pytest.mark.parametrize("address", ["", "9443", "host:", "host:x", "host:70000", "host:-1"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    if address == "9443":
        assert split_address(f":{address}") == ("127.0.0.1", 9443)
        return
    with pytest.raises(Mistake, match="HOST:PORT"):
        split_address(address)
