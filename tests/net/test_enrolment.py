"""Enrolment: keys stay at their site, and only certificates that fit are installed."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from raw import Raw

from kilter.errors import Mistake
from kilter.net import enrolment, grpc_server, tls
from kilter.net.doctor import Finding, examine
from kilter.net.revocation import revocation_list, revoke


def enrol(home: Path, name: str, at: Path, role: str = "site", days: int = 90) -> Path:
    folder = home / name
    mark = enrolment.request(name, folder)
    signed = home / f"{name}-signed"
    assert enrolment.sign(folder / "request.pem", at, name, role, days, signed) == mark  # type: ignore[arg-type]
    enrolment.install(signed, folder)
    return folder


@pytest.fixture(params=[0, 1], ids=["root", "intermediate"])
def authority(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    enrolment.authority(tmp_path / "root", "root", None, 900)
    if not request.param:
        return tmp_path / "root"
    enrolment.authority(tmp_path / "clinic-authority", "clinic", tmp_path / "root", 600)
    return tmp_path / "clinic-authority"


def handshake(server: Path, client: Path, name: str) -> str:
    """Whom the server sees, after a real handshake with certificates on both sides."""
    there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(server / "ca.pem"))
    there.load_cert_chain(server / "cert.pem", server / "key.pem")
    there.verify_mode = ssl.CERT_REQUIRED
    here = ssl.create_default_context(cafile=str(client / "ca.pem"))
    here.load_cert_chain(client / "cert.pem", client / "key.pem")
    one, two = socket.socketpair()
    seen: list[str] = []

    def serve() -> None:
        with there.wrap_socket(one, server_side=True) as secure:
            certificate = secure.getpeercert(binary_form=True)
            assert certificate is not None
            seen.append(tls.holder(x509.load_der_x509_certificate(certificate)))
            secure.send(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    with here.wrap_socket(two, server_hostname=name) as secure:
        secure.recv(1)
    thread.join(5)
    return seen[0]


def test_a_site_and_a_server_trust_each_other(authority: Path, tmp_path: Path) -> None:
    site, server = enrol(tmp_path, "hospital-a", authority), enrol(tmp_path, "server", authority, "server")
    assert handshake(server, site, "server") == "hospital-a"
    identity = tls.Identity.read(site)
    assert identity.name == "hospital-a"
    assert identity.days_left() == pytest.approx(90, abs=0.1)
    assert tls.role(x509.load_pem_x509_certificate(identity.cert)) == "site"


def test_the_key_never_leaves_and_is_kept_when_renewing(authority: Path, tmp_path: Path) -> None:
    site = enrol(tmp_path, "a", authority, days=5)
    key = (site / "key.pem").read_bytes()
    assert (site / "key.pem").stat().st_mode & 0o077 == 0
    assert b"PRIVATE" not in (site / "request.pem").read_bytes()
    assert not list((tmp_path / "a-signed").glob("*key*"))
    before = tls.Identity.read(site).expires
    enrol(tmp_path, "a", authority, days=80)
    assert (site / "key.pem").read_bytes() == key
    after = tls.Identity.read(site).expires
    assert before is not None
    assert after is not None
    assert after > before


def test_a_certificate_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    enrolment.authority(root, "root", None, 900)
    enrolment.authority(tmp_path / "other", "root", None, 900)  # the same name, another key
    site = enrol(tmp_path, "a", root)
    enrolment.request("b", tmp_path / "b")
    enrolment.sign(tmp_path / "b/request.pem", root, "b", "site", 9, tmp_path / "b-signed")
    before = (site / "cert.pem").read_bytes()
    with pytest.raises(Mistake, match="another key"):
        enrolment.install(tmp_path / "b-signed", site)
    (tmp_path / "a-signed" / "ca.pem").write_bytes((tmp_path / "other/ca.pem").read_bytes())
    with pytest.raises(Mistake, match="was not signed by"):
        enrolment.install(tmp_path / "a-signed", site)
    assert (site / "cert.pem").read_bytes() == before


def altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] = ord("A") if data[len(data) // 2] != ord("A") else ord("B")
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("spoil", "name", "role", "sentence"),
    [
        (lambda path: None, "b", "site", "The request is for 'a', not for 'b'"),
        (lambda path: None, "a", "king", "'king' is not a role"),
        (lambda path: path.write_text("hello"), "a", "site", "is not a signing request"),
        (lambda path: path.unlink(), "a", "site", "cannot be read"),
        (altered, "a", "site", "was altered|is not a signing request|another kind|The request is for"),
    ],
)
def test_bad_requests(spoil: Callable[[Path], None], name: str, role: str, sentence: str, tmp_path: Path) -> None:
    enrolment.authority(tmp_path / "root", "root", None, 900)
    enrolment.request("a", tmp_path / "a")
    spoil(tmp_path / "a/request.pem")
    with pytest.raises(Mistake, match=sentence):
        enrolment.sign(tmp_path / "a/request.pem", tmp_path / "root", name, role, 9, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "cert.pem").exists()


@pytest.mark.parametrize("name", ["", "a b", "../a", "x" * 65])
def test_names_are_plain(name: str, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be a name"):
        enrolment.request(name, tmp_path / "x")


def test_an_expiring_certificate_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls.new(tmp_path, ["a"], days=12)
    with caplog.at_level("WARNING", "kilter.net"):
        tls.Identity.read(tmp_path / "a")
    assert "the certificate of a expires in 12 days" in caplog.text
    tls.new(tmp_path, ["b"], days=60)
    caplog.clear()
    tls.Identity.read(tmp_path / "b")
    assert caplog.text == ""


# The doctor -----------------------------------------------------------------------------------------------------------


def problems(**options: object) -> dict[str, Finding]:
    given = {"folder": None, "server": "", "server_name": "server", "policy": None, "data": ""} | options
    return {f.check: f for f in examine(**given) if not f.ok}  # type: ignore[arg-type]


def test_a_healthy_site_has_no_problems(authority: Path, tmp_path: Path) -> None:
    site = enrol(tmp_path, "a", authority)
    assert problems(folder=site, state_dir=tmp_path / "state") == {}


def test_the_doctor_names_what_to_fix(tmp_path: Path) -> None:
    tls.new(tmp_path, ["a", "b"], days=10)
    actual = problems(folder=tmp_path / "a", state_dir=tmp_path / "state")
    assert "renew it" in actual["key and certificate"].fix
    (tmp_path / "a" / "key.pem").write_bytes((tmp_path / "b" / "key.pem").read_bytes())
    actual = problems(folder=tmp_path / "a", state_dir=tmp_path / "state")
    assert "do not belong together" in actual["key and certificate"].text
    (tmp_path / "a" / "key.pem").chmod(0o644)
    actual = problems(folder=tmp_path / "a", state_dir=tmp_path / "state")
    assert "chmod 600" in actual["key and certificate"].text
    (tmp_path / "site.toml").write_text("approval = 3")
    assert "policy" in problems(state_dir=tmp_path / "state", policy=tmp_path / "site.toml")
    assert "data" in problems(state_dir=tmp_path / "state", data=str(tmp_path / "absent.csv"))


def test_the_doctor_tries_the_server(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    actual = problems(server=f"127.0.0.1:{port}", state_dir=tmp_path / "state")
    assert "cannot be reached" in actual["server"].text
    from kilter.net.grpc_server import GrpcServer

    tls.new(tmp_path / "certs", ["server", "a"])
    tls.new(tmp_path / "strangers", ["a"])
    server = GrpcServer("127.0.0.1:0", tls.Identity.read(tmp_path / "certs/server"), None)
    try:
        address = f"127.0.0.1:{server.port}"
        assert problems(folder=tmp_path / "certs/a", server=address, state_dir=tmp_path / "state") == {}
        strange = problems(folder=tmp_path / "strangers/a", server=address, state_dir=tmp_path / "state")
        assert "its certificate is refused" in strange["server"].text
        misnamed = problems(
            folder=tmp_path / "certs/a", server=address, server_name="other", state_dir=tmp_path / "state"
        )
        assert "its certificate is refused" in misnamed["server"].text
    finally:
        server.close()


def test_a_chain_holds_until_its_first_certificate_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enrolment.authority(tmp_path / "root", "root", None, 900)
    site = enrol(tmp_path, "a", tmp_path / "root", days=90)
    chain = x509.load_pem_x509_certificates((site / "cert.pem").read_bytes())
    root = x509.load_pem_x509_certificate((site / "ca.pem").read_bytes())

    def days_later(days: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:
                return datetime.now(UTC) + timedelta(days=days)

        monkeypatch.setattr(enrolment, "datetime", Clock)
        enrolment.check_chain(chain, root)

    for days in (0, 89):
        days_later(days)
    for days in (-2, 91, 901):
        with pytest.raises(Mistake, match=r"The certificate of 'a' is valid from .*: renew it, or set the clock"):
            days_later(days)


def test_files_that_are_no_requests_or_lists(tmp_path: Path) -> None:
    root = tmp_path / "root"
    enrolment.authority(root, "root", None, 900)
    site = enrol(tmp_path, "a", root)
    before = (site / "cert.pem").read_bytes()
    (site / "request.pem").write_text("nonsense")
    with pytest.raises(Mistake, match=r"request\.pem' is not a signing request"):
        enrolment.install(tmp_path / "a-signed", site)
    assert (site / "cert.pem").read_bytes() == before
    (root / "revoked.pem").write_text("nonsense")
    with pytest.raises(Mistake, match=r"revoked\.pem' is not a revocation list"):
        revoke(site / "cert.pem", root)
    assert (root / "revoked.pem").read_text() == "nonsense"


# Revocation -----------------------------------------------------------------------------------------------------------


def test_revoked_certificates_are_listed_once_and_the_file_is_followed(authority: Path, tmp_path: Path) -> None:
    first, second = enrol(tmp_path, "a", authority), enrol(tmp_path, "b", authority)
    path = revoke(first / "cert.pem", authority)
    assert revoke(first / "cert.pem", authority) == path
    listed = revocation_list(path, tls.Identity.read(second))
    assert listed is not None
    serials = [x509.load_pem_x509_certificate((f / "cert.pem").read_bytes()).serial_number for f in (first, second)]
    assert [listed.has(s) for s in serials] == [True, False]
    revoke(second / "cert.pem", authority)
    os.utime(path, (1, 1))
    assert [listed.has(s) for s in serials] == [True, True]
    path.write_text("nonsense")
    os.utime(path, (2, 2))
    assert [listed.has(s) for s in serials] == [True, True]  # the last list stays in force


def test_a_list_of_a_stranger_is_refused(tmp_path: Path) -> None:
    for name in ("root", "other"):
        enrolment.authority(tmp_path / name, name, None, 900)
    site, strange = enrol(tmp_path, "a", tmp_path / "root"), enrol(tmp_path, "x", tmp_path / "other")
    path = revoke(strange / "cert.pem", tmp_path / "other")
    with pytest.raises(Mistake, match="was not signed by an authority that is trusted here"):
        revocation_list(path, tls.Identity.read(site))
    with pytest.raises(Mistake, match="another authority"):
        revoke(strange / "cert.pem", tmp_path / "root")
    with pytest.raises(Mistake, match="needs --tls"):
        revocation_list(path, None)


def ended(site: Raw) -> str:
    """Why the server ended a site's stream."""
    end = site.refused()
    site.close()
    assert end.code() == grpc.StatusCode.PERMISSION_DENIED
    return str(end.details())


def test_an_open_connection_ends_when_its_certificate_is_revoked(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "REVOCATION_SECONDS", 0.2)
    me = enrol(tmp_path, "server", authority, "server")
    site, other = enrol(tmp_path, "a", authority), enrol(tmp_path, "b", authority)
    watcher = enrol(tmp_path, "c", authority, "observer")
    path = revoke(other / "cert.pem", authority)
    identity = tls.Identity.read(me)
    server = grpc_server.GrpcServer("127.0.0.1:0", identity, None, revoked=revocation_list(path, identity))
    try:
        assert ended(Raw(server.port, tls.Identity.read(other), "b")) == "its certificate was revoked"
        assert ended(Raw(server.port, tls.Identity.read(watcher), "c")).startswith(
            "its certificate is for the role observer"
        )
        connected = Raw(server.port, tls.Identity.read(site), "a")
        with server.changed:
            assert server.changed.wait_for(lambda: "a" in server.sites, 10)
        revoke(site / "cert.pem", authority)
        os.utime(path, (1, 1))  # file systems with coarse clocks
        assert ended(connected) == "its certificate was revoked"
    finally:
        server.close()
