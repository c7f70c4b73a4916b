"""The metrics port: bounded, local unless it has TLS and a token, and unimpressed by half-open requests."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kilter.errors import Mistake
from kilter.net import metrics, tls
from kilter.net.metrics import MOST_LABELS, MOST_REQUESTS, MetricName, MetricsPort, exposition, publish
from kilter.net.ports import split_address
from kilter.net.status import StatusBoard
from kilter.runtimes.base import Runtime
from small import federation

COUNT = MetricName("kilter_things", "Things.", "counter")
LOCAL = MetricsPort("127.0.0.1:0")


@pytest.fixture
def board() -> StatusBoard:
    fed: Runtime = federation()
    return StatusBoard("server", fed, 3, lambda: (["c1"], {"in": 5}, ""), enough=2)


def get(url: str, context: ssl.SSLContext | None = None, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


@pytest.mark.slow
def test_half_open_requests_hold_neither_threads_nor_the_port(
    board: StatusBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 12: 300 half-open requests held 300 threads."""
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 0.5)
    port = board.publish(LOCAL)
    before = threading.active_count()
    half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for one in half_open:
        one.send(b"GET /metrics HTTP/1.1\r\n")
    time.sleep(0.3)
    assert threading.active_count() - before <= 2 * MOST_REQUESTS + 2
    time.sleep(1.0)
    assert "kilter_rounds 3" in get(f"http://127.0.0.1:{port}/metrics")[1]
    for one in half_open:
        one.close()


def test_prometheus_can_read_the_metrics_of_a_run(board: StatusBoard) -> None:
    port = board.publish(LOCAL)
    _, text = get(f"http://127.0.0.1:{port}/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["kilter_received_bytes"].samples[0].value == 5
    up = {sample.labels["site"]: sample.value for sample in families["kilter_site_up"].samples}
    assert up["c1"] == 1.0
    assert all(re.fullmatch(r"kilter_[a-z_]+", name) for name in families)
    assert get(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n")
    assert get(f"http://127.0.0.1:{port}/readyz") == (503, "1 sites are connected, and the run needs 2\n")
    board.enough = 1
    assert get(f"http://127.0.0.1:{port}/readyz") == (200, "ready\n")
    assert get(f"http://127.0.0.1:{port}/secrets")[0] == 404


def test_the_number_of_labels_is_bounded() -> None:
    many = {str(k): 1.0 for k in range(3 * MOST_LABELS)}
    text = exposition(lambda: {MetricName("kilter_site_up", "Up.", label="site"): many}).decode()
    assert text.count("kilter_site_up{") == MOST_LABELS


def test_a_name_cannot_break_out_of_its_label() -> None:
    text = exposition(lambda: {MetricName("kilter_site_up", "Up.", label="site"): {'a"} 1\nevil 2': 1.0}}).decode()
    assert [family.name for family in text_string_to_metric_families(text)] == ["kilter_site_up"]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:9000", "[::]:0", "example.org:80"])
def test_without_tls_and_token_metrics_are_for_this_machine_only(address: str, tmp_path: Path) -> None:
    for tls_folder, token in ((None, None), (tmp_path, None), (None, tmp_path)):
        with pytest.raises(Mistake, match="this machine only"):
            publish(MetricsPort(address, tls_folder, token), dict)


def test_tls_and_a_token(tmp_path: Path) -> None:
    tls.new(tmp_path / "certs", ["localhost"])
    (tmp_path / "token").write_text("0123456789abcdef\n")
    port = publish(MetricsPort("0.0.0.0:0", tmp_path / "certs/localhost", tmp_path / "token"), lambda: {COUNT: 2.0})
    trust = ssl.create_default_context(cafile=str(tmp_path / "certs/ca.pem"))
    url = f"https://localhost:{port}"
    assert get(f"{url}/metrics", trust)[0] == 401
    assert get(f"{url}/metrics", trust, "0123456789abcdeX")[0] == 401
    assert "kilter_things_total 2.0" in get(f"{url}/metrics", trust, "0123456789abcdef")[1]
    assert get(f"{url}/healthz", trust) == (200, "ok\n")


def test_a_token_that_is_missing_or_short_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be read"):
        publish(MetricsPort("127.0.0.1:0", token=tmp_path / "none"), dict)
    (tmp_path / "token").write_text("short")
    with pytest.raises(Mistake, match="too short"):
        publish(MetricsPort("127.0.0.1:0", token=tmp_path / "token"), dict)


@pytest.mark.parametrize("address", ["", "9443", "host:", "host:x", "host:70000", "host:-1"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    if address == "9443":
        assert split_address(f":{address}") == ("127.0.0.1", 9443)
        return
    with pytest.raises(Mistake, match="HOST:PORT"):
        split_address(address)
