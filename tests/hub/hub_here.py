"""A hub in this process, with processes and agents that do what a test wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hub_place import PEOPLE, enrol

from kilter.hub import hub as hub_module
from kilter.hub import service as service_module
from kilter.hub.client import HubClient
from kilter.hub.config import HubConfig
from kilter.hub.hub import Hub
from kilter.hub.messages import AGENT, AgentHello, AgentReport, Assignment, SiteReport, SubmitRequest, decode, encode
from kilter.hub.service import HubService
from kilter.net.frames import JOB_KEY, OPTIONS
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
