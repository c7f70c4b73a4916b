"""The hub's port: who may connect, what is refused, and which certificates count."""

from __future__ import annotations

import socket
import ssl
import time

import grpc
import pytest
from cryptography import x509
from hub_here import FakeAgent, HubHere
from hub_place import enrol

from kilter.errors import Mistake
from kilter.hub import service as service_module
from kilter.hub.messages import AgentHello, encode
from kilter.net.frames import ATTEND, read_letter, to_frames
from kilter.net.revocation import revoke


@pytest.mark.parametrize(
    ("name", "hello", "why"),
    [
        ("stranger", None, "not on the hub's list"),
        ("spare", None, "revoked"),
        ("alice", None, "states the role submitter"),
        ("a", encode(AgentHello("b", 1)), "another name"),
        ("a", b"nonsense", "cannot be read"),
        ("a", encode(AgentHello("a", 1, (7, 9))), "update kilter at the hub"),
        ("a", encode(AgentHello("a", 1, (0, 0))), "update kilter at the site"),
    ],
)
def test_agents_that_are_refused(here: HubHere, name: str, hello: bytes | None, why: str) -> None:
    code, details = FakeAgent(here, name, hello).refusal()
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert why in details
    assert not here.hub.agents


def test_a_newer_agent_takes_the_place_of_an_older_one(here: HubHere) -> None:
    old, new = FakeAgent(here, "a"), FakeAgent(here, "a")
    code, details = old.refusal()
    assert (code, "newer agent" in details) == (grpc.StatusCode.ABORTED, True)
    here.until(lambda: len(here.hub.agents) == 1)
    new.report()


def test_a_revoked_certificate_ends_an_open_connection(here: HubHere) -> None:
    agent = FakeAgent(here, "a")
    here.until(lambda: here.hub.agents)
    revoke(here.folder / "a/cert.pem", here.folder / "authority")
    assert "revoked" in agent.refusal()[1]
    here.until(lambda: not here.hub.agents)
    client = here.client("alice")
    revoke(here.folder / "alice/cert.pem", here.folder / "authority")
    with pytest.raises(Mistake, match="revoked"):
        client.jobs()


def shown_certificate(here: HubHere) -> x509.Certificate:
    """The certificate that the hub's port shows to a new connection."""
    context = ssl.create_default_context(cafile=str(here.folder / "alice/ca.pem"))
    context.load_cert_chain(here.folder / "alice/cert.pem", here.folder / "alice/key.pem")
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", here.port))
    with context.wrap_socket(plain, server_hostname="server") as secure:
        data = secure.getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data)


def test_a_certificate_that_expires_soon_is_named(here: HubHere, caplog: pytest.LogCaptureFixture) -> None:
    enrol(here.folder, "a", "site", days=12)
    FakeAgent(here, "a")
    here.until(lambda: here.hub.agents)
    here.until(lambda: "the certificate of a expires in 12 days" in caplog.text)
    time.sleep(0.2)
    assert (
        caplog.text.count("the certificate of a expires") == 2
    )  # by this process, which reads it, and by the hub: once
    assert here.hub.agents["a"].days_left() == pytest.approx(12, abs=0.1)


def test_a_renewed_certificate_of_the_hub_is_shown_to_new_connections(here: HubHere) -> None:
    before = shown_certificate(here)
    client = here.client()
    assert client.jobs() == []
    enrol(here.folder, "server", "server", days=300)
    after = shown_certificate(here)
    assert after.serial_number != before.serial_number
    assert after.not_valid_after_utc > before.not_valid_after_utc
    assert client.jobs() == []  # the open connection goes on


def hello_of(name: str) -> bytes:
    return next(to_frames({"kind": "hello", "name": name}))


@pytest.mark.parametrize(
    ("job", "hello", "why"),
    [
        ("77", "a", "no such run"),
        ("x", "a", "no such run"),
        ("", "a", "no such run"),
        ("1", "b", "its certificate is for 'a'"),
    ],
)
def test_streams_that_are_not_passed_on(here: HubHere, job: str, hello: str, why: str) -> None:
    here.submit()
    code, details = FakeAgent(here, "a", hello_of(hello), ATTEND, job).refusal()
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert why in details


def test_a_stream_waits_for_a_run_that_does_not_run_and_leaves_one_that_is_finished(here: HubHere) -> None:
    job = here.submit()
    assert FakeAgent(here, "a", hello_of("a"), ATTEND, str(job)).refusal()[0] == grpc.StatusCode.UNAVAILABLE
    here.thread.run(finish(here, job))
    stream = FakeAgent(here, "a", hello_of("a"), ATTEND, str(job)).stream
    head, _ = here.thread.run(read_letter(stream.read, 0), 10)
    assert (head["kind"], head["finished"]) == ("goodbye", True)


async def finish(here: HubHere, job: int) -> None:
    here.hub.queue.move(job, "finished")


def test_a_submitter_cannot_flood_the_queue(here: HubHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MOST_ACTIVE", 2)
    here.submit()
    here.submit()
    with pytest.raises(Mistake, match="jobs that are not over"):
        here.submit()
