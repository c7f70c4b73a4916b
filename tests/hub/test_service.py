"""The hub's port, in this process: who may connect, what is refused, and what becomes of jobs whose processes end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc import aio
from hub_place import PEOPLE, enrol

from kilter.errors import Mistake
from kilter.hub import hub as hub_module
from kilter.hub import service as service_module
from kilter.hub.client import HubClient
from kilter.hub.config import HubConfig
from kilter.hub.hub import Hub
from kilter.hub.messages import AGENT, AgentHello, AgentReport, Assignment, SiteReport, SubmitRequest, decode, encode
from kilter.hub.service import HubService
from kilter.net.frames import ATTEND, JOB_KEY, OPTIONS, read_letter, to_frames
from kilter.net.ports import LoopThread
from kilter.net.revocation import revocation_list, revoke
from kilter.net.tls import Identity

SITES = ("a", "b")


class FakeProcess:
    """A process of a run that ends when the test says so."""

    pid = 1

    def __init__(self, log: Path) -> None:
        self.log, self.stopping = log, False
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self.code

    async def stop(self) -> None:
        self.stopping = True
        if not self.code.done():
            self.code.set_result(130)


class HubHere:
    """A hub in a thread of this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name, role in {**PEOPLE, **dict.fromkeys((*SITES, "stranger", "spare"), "site")}.items():
            enrol(folder, name, role)
        self.processes: list[FakeProcess] = []
        self.words: list[list[str]] = []
        monkeypatch.setattr(hub_module, "TICK", 0.05)
        monkeypatch.setattr(service_module, "REVOCATION_SECONDS", 0.05)
        monkeypatch.setattr(hub_module.ChildProcess, "start", self._start)
        monkeypatch.setattr(service_module, "check", self._check)
        listed = revoke(folder / "spare/cert.pem", folder / "authority")
        self.identity = Identity.read(folder / "server")
        self.config = HubConfig(folder / "server", SITES, "127.0.0.1:0", folder / "state", patience=0.3)
        self.thread = LoopThread("hub")
        self.port = self.thread.run(self._open(listed))
        self.clients: list[HubClient] = []

    async def _open(self, listed: Path) -> int:
        self.hub = Hub(self.config)
        self.service = HubService(self.hub, self.identity, revocation_list(listed, self.identity))
        self.server, port = await self.service.open(self.config.listen)
        self.loop = asyncio.create_task(self.hub.run())
        return port

    async def _start(self, words: list[str], log: Path) -> FakeProcess:
        self.words.append(words)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self.processes.append(FakeProcess(log))
        return self.processes[-1]

    async def _check(self, request: SubmitRequest, data: object) -> dict[str, object]:
        return {
            "kind": "study" if "methods" in request.text else "experiment",
            "name": "x",
            "rounds": 2,
            "data": "none",
        }

    def client(self, name: str = "alice") -> HubClient:
        self.clients.append(HubClient(f"127.0.0.1:{self.port}", Identity.read(self.folder / name)))
        return self.clients[-1]

    def submit(self, **options: Any) -> int:
        return self.client().submit(SubmitRequest("method = 'fedavg'", "trial", **options)).job

    def end_process(self, code: int, says: str = "", result: Path | None = None) -> None:
        """The newest process ends."""
        process = self.processes[-1]
        process.log.write_text(says)
        if result is not None:
            result.parent.mkdir(parents=True, exist_ok=True)
            result.touch()
        self.thread.loop.call_soon_threadsafe(process.code.set_result, code)

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    def state(self, job: int) -> str:
        return self.client("eve").job(job)[0].state

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.thread.run(self._close())
        self.thread.stop()

    async def _close(self) -> None:
        self.loop.cancel()
        await asyncio.gather(self.loop, return_exceptions=True)
        await self.server.stop(0.1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubHere]:
    hub = HubHere(tmp_path, monkeypatch)
    yield hub
    hub.close()


class FakeAgent:
    """An agent's stream that says what a test wants."""

    def __init__(
        self, here: HubHere, name: str, first: bytes | None = None, method: str = AGENT, job: str = ""
    ) -> None:
        self.thread, self.name = here.thread, name
        self.identity = Identity.read(here.folder / name)
        self.stream = self.thread.run(self._open(here.port, method, job))
        with suppress(aio.AioRpcError):  # it may be refused before it has said anything
            self.send(first if first is not None else encode(AgentHello(name, 1)))

    async def _open(self, port: int, method: str, job: str) -> Any:
        options = [*OPTIONS, ("grpc.ssl_target_name_override", "server")]
        self.channel = aio.secure_channel(f"127.0.0.1:{port}", self.identity.for_client(), options=options)
        return self.channel.stream_stream(method)(metadata=((JOB_KEY, job),) if job else ())

    def send(self, data: bytes) -> None:
        self.thread.run(self._send(data), 10)

    async def _send(self, data: bytes) -> None:
        await self.stream.write(data)

    def report(self, *reports: SiteReport) -> None:
        self.send(encode(AgentReport(list(reports))))

    def assignment(self) -> Assignment:
        return decode(self.thread.run(self._read(), 10), Assignment)

    async def _read(self) -> Any:
        return await self.stream.read()

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        return self.thread.run(self._refusal(), 10)

    async def _refusal(self) -> tuple[grpc.StatusCode, str]:
        try:
            while await self.stream.read():
                pass
        except aio.AioRpcError:
            pass
        return await self.stream.code(), await self.stream.details()

    def close(self) -> None:
        self.thread.run(self.channel.close(), 10)


def agents(here: HubHere) -> list[FakeAgent]:
    connected = [FakeAgent(here, name) for name in SITES]
    here.until(lambda: len(here.hub.agents) == 2)
    return connected


def test_a_job_runs_when_its_agents_are_there_and_ends_with_its_process(here: HubHere) -> None:
    job = here.submit()
    here.until(lambda: here.state(job) == "waiting")
    first, _ = agents(here)
    here.until(lambda: here.state(job) == "running")
    seen = first.assignment()
    while seen.run != [job]:
        seen = first.assignment()
    assert here.words[0][:1] == ["serve"]
    assert "--insecure" in here.words[0]
    here.end_process(0, result=here.folder / f"state/jobs/{job}/run/summary.json")
    here.until(lambda: here.state(job) == "finished")
    while seen.run or seen.hold:
        seen = first.assignment()


@pytest.mark.parametrize(
    ("code", "says", "reason"), [(2, "x\nkilter: Bad data.\n", "Bad data."), (0, "", "without a result")]
)
def test_a_job_fails_with_the_reason_of_its_process(here: HubHere, code: int, says: str, reason: str) -> None:
    agents(here)
    job = here.submit()
    here.until(lambda: here.processes)
    here.end_process(code, says)
    here.until(lambda: here.state(job) == "failed")
    assert reason in here.client().job(job)[0].reason


def test_a_crashed_process_starts_again_but_not_forever(here: HubHere) -> None:
    agents(here)
    job = here.submit()
    for attempt in (1, 2, 3):
        here.until(lambda count=attempt: len(here.processes) == count)
        here.end_process(-9, "Segmentation fault")
    here.until(lambda: here.state(job) == "failed")
    assert "crashed 3 times: Segmentation fault" in here.client().job(job)[0].reason


def test_crashes_count_only_as_long_as_there_is_no_new_round(here: HubHere) -> None:
    agents(here)
    job = here.submit()
    rounds = here.folder / f"state/jobs/{job}/run/rounds.jsonl"
    rounds.parent.mkdir(parents=True)
    for attempt in range(1, 7):
        here.until(lambda count=attempt: len(here.processes) == count)
        if attempt % 2 == 0:
            rounds.write_text("{}\n" * attempt)
        here.end_process(-9)
    here.until(lambda: len(here.processes) == 7)
    assert here.state(job) == "running"


def test_a_lost_quorum_suspends_the_job_and_it_resumes(here: HubHere) -> None:
    _, second = agents(here)
    job = here.submit()
    here.until(lambda: here.state(job) == "running")
    second.close()
    here.until(lambda: here.state(job) == "waiting")
    assert here.processes[0].stopping
    FakeAgent(here, "b")
    here.until(lambda: here.state(job) == "running")
    assert len(here.processes) == 2


def test_what_a_site_reports_decides(here: HubHere) -> None:
    _, second = agents(here)
    job = here.submit()
    here.until(lambda: here.state(job) == "running")
    second.report(SiteReport(job, "pending", "terms wait\x1b[31m"))
    here.until(lambda: here.state(job) == "waiting")
    assert "b: terms wait?[31m" in here.client().job(job)[0].reason
    second.report()
    here.until(lambda: here.state(job) == "running")
    second.report(SiteReport(job, "refused", "only allows fedavg"))
    here.until(lambda: here.state(job) == "failed")


def test_cancelling_stops_the_process(here: HubHere) -> None:
    agents(here)
    job = here.submit()
    here.until(lambda: here.processes)
    assert here.client().cancel(job).state == "cancelled"
    here.until(lambda: here.processes[0].stopping)


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


def test_a_full_disk_does_not_end_the_hub(here: HubHere, monkeypatch: pytest.MonkeyPatch) -> None:
    agents(here)
    working = hub_module.ChildProcess.start

    async def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_module.ChildProcess, "start", full)
    job = here.submit()
    here.until(lambda: "No space left" in here.hub.problem)
    monkeypatch.setattr(hub_module.ChildProcess, "start", working)
    here.until(lambda: not here.hub.problem and here.processes)
    assert here.state(job) == "running"


def test_two_hubs_cannot_share_a_folder(here: HubHere) -> None:
    with pytest.raises(Mistake, match="Another hub works"):
        Hub(replace(here.config))


@pytest.mark.parametrize("first", ["change", "cancel"])
def test_a_hub_stops_even_if_something_changes_at_the_same_moment(tmp_path: Path, first: str) -> None:
    """asyncio.wait_for swallowed the signal in Python 3.11, and the hub went on."""

    async def script() -> bool:
        hub = Hub(HubConfig(tmp_path, SITES, "127.0.0.1:0", tmp_path / "state"))
        task = asyncio.create_task(hub.run())
        await asyncio.sleep(0.1)
        for action in (hub.changed.set, task.cancel) if first == "change" else (task.cancel, hub.changed.set):
            action()
        done, _ = await asyncio.wait({task}, timeout=3.0)
        task.cancel()
        return bool(done)

    assert asyncio.run(script())
