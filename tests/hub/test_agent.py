"""The agent of a site: it runs what the hub wants, within its limits, and reports how each run is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hub_place import enrol
from typer.main import get_command
from typer.testing import CliRunner

from kilter.cli import app
from kilter.errors import Mistake
from kilter.hub import agent as agent_module
from kilter.hub.agent import Agent
from kilter.hub.config import SiteConfig
from kilter.hub.messages import Assignment
from kilter.hub.processes import NOT_APPROVED, REFUSED
from kilter.net.audit import AuditLog

DIGEST = "0123456789abcdef" * 2


class FakeProcess:
    """A site's process that ends when the test says so."""

    started: ClassVar[list[FakeProcess]] = []
    pid = 1

    def __init__(self, words: list[str], log: Path) -> None:
        self.job, self.log, self.stopping = int(words[words.index("--job") + 1]), log, False
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        FakeProcess.started.append(self)

    @staticmethod
    async def start(words: list[str], log: Path) -> FakeProcess:
        log.parent.mkdir(parents=True, exist_ok=True)
        return FakeProcess(words, log)

    async def wait(self) -> int:
        return await self.code

    async def stop(self) -> None:
        self.stopping = True
        self.code.set_result(130)

    def end(self, code: int, says: str = "") -> None:
        self.log.write_text(says)
        self.code.set_result(code)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Agent]:
    monkeypatch.setattr(agent_module, "ChildProcess", FakeProcess)
    FakeProcess.started = []
    identity = enrol(tmp_path, "a", "site")

    def agent(**settings: Any) -> Agent:
        return Agent(SiteConfig("hub:1", identity, "a.npz", state=tmp_path / "state", **settings))

    return agent


def states(agent: Agent) -> dict[int, str]:
    return {number: run.state for number, run in sorted(agent.runs.items())}


async def settle(agent: Agent, times: int = 4) -> None:
    for _ in range(times):
        await agent.step()
        await asyncio.sleep(0)


def play(script: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(script())  # type: ignore[arg-type]


def test_runs_start_oldest_first_within_the_limit(make: Callable[..., Agent]) -> None:
    async def script() -> None:
        agent = make(parallel=2)
        agent.assignment = Assignment([3, 1, 2], [])
        await settle(agent)
        assert [p.job for p in FakeProcess.started] == [1, 2]
        FakeProcess.started[0].end(0)
        await settle(agent)
        assert states(agent) == {1: "finished", 2: "running", 3: "running"}
        agent.assignment = Assignment([3], [])
        await settle(agent)
        assert states(agent) == {3: "running"}
        assert FakeProcess.started[1].stopping
        assert not FakeProcess.started[2].stopping

    play(script)


def test_terms_that_wait_for_an_approval(make: Callable[..., Agent], tmp_path: Path) -> None:
    async def script() -> None:
        agent = make()
        agent.assignment = Assignment([1], [])
        await settle(agent)
        FakeProcess.started[0].end(NOT_APPROVED, f"kilter: The terms {DIGEST} are not approved at this site.")
        await settle(agent)
        assert states(agent) == {1: "pending"}
        assert DIGEST in agent.runs[1].why
        agent.assignment = Assignment([], [1])  # the hub holds the run back
        await settle(agent)
        assert states(agent) == {1: "pending"}
        (tmp_path / "state/approvals.jsonl").write_text(json.dumps({"digest": DIGEST}) + "\n")
        await settle(agent)
        assert states(agent) == {1: "starting"}  # the hub hears it, and starts the run
        agent.assignment = Assignment([1], [])
        await settle(agent)
        assert len(FakeProcess.started) == 2

    play(script)


def test_a_refusal_is_remembered_as_long_as_the_hub_knows_the_run(make: Callable[..., Agent]) -> None:
    async def script() -> None:
        agent = make()
        agent.assignment = Assignment([1], [])
        await settle(agent)
        FakeProcess.started[0].end(REFUSED, "kilter: This site only allows fedavg.")
        await settle(agent)
        assert (states(agent), agent.runs[1].why) == ({1: "refused"}, "This site only allows fedavg.")
        agent.assignment = Assignment([], [1])
        await settle(agent)
        assert states(agent) == {1: "refused"}
        agent.assignment = Assignment([], [])
        await settle(agent)
        assert states(agent) == {}
        assert len(FakeProcess.started) == 1

    play(script)


def test_a_failing_process_is_tried_again_after_a_while(
    make: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(agent_module.time, "monotonic", lambda: now[0])

    async def script() -> None:
        agent = make()
        agent.assignment = Assignment([1], [])
        await settle(agent)
        FakeProcess.started[0].end(1, "MemoryError")
        await settle(agent)
        assert (states(agent), agent.runs[1].why) == ({1: "failing"}, "MemoryError")
        first = agent.runs[1].retry_at - now[0]
        now[0] += first
        await settle(agent)
        assert (states(agent), len(FakeProcess.started)) == ({1: "running"}, 2)
        FakeProcess.started[1].end(-9)
        await settle(agent)
        assert agent.runs[1].retry_at - now[0] == 2 * first  # growing pauses
        assert "ended with code -9" in agent.runs[1].why

    play(script)


def test_the_hub_hears_of_every_change(make: Callable[..., Agent]) -> None:
    async def script() -> None:
        agent = make()
        reports: list[dict[int, str]] = []
        agent.on_report = lambda: reports.append(states(agent))
        agent.assignment = Assignment([1], [])
        await settle(agent)
        FakeProcess.started[0].end(0)
        await settle(agent)
        assert reports[0] == {1: "running"}
        assert reports[-1] == {1: "finished"}

    play(script)


def test_a_process_is_the_join_command_with_its_own_state_and_shared_approvals(
    make: Callable[..., Agent], tmp_path: Path
) -> None:
    agent = make(policy=tmp_path / "p.toml", table={"test_file": "t.csv"}, weights="w", device="cuda:1")
    words = agent.words(7)
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--state-dir") + 1] == str(tmp_path / "state/runs/7")
    assert words[words.index("--approvals") + 1] == str(tmp_path / "state")
    assert words[words.index("--test-file") + 1] == "t.csv"


def test_two_agents_cannot_share_a_folder(make: Callable[..., Agent]) -> None:
    first = make()
    with pytest.raises(Mistake, match="Another agent works"):
        make()
    assert first.runs == {}


def test_the_audit_logs_of_all_runs_are_verified(tmp_path: Path) -> None:
    for run in ("2", "10"):
        log = AuditLog(tmp_path / "state/runs" / run)
        log.record("reply", b"x", run=run * 8, step="train", to="server")
        log.close()
    shown = CliRunner().invoke(app, ["audit", "--state-dir", str(tmp_path / "state")])
    assert shown.exit_code == 0
    assert shown.output.count("all genuine") == 2
    assert shown.output.index("runs/2/") < shown.output.index("runs/10/")
    words = ["audit", "--state-dir", str(tmp_path / "state"), "--export", str(tmp_path / "x.csv")]
    assert "several audit logs" in str(CliRunner().invoke(app, words).exception)
    path = tmp_path / "state/runs/10/audit.jsonl"
    path.write_text(path.read_text().replace("train", "trick"))
    assert "was changed" in str(CliRunner().invoke(app, ["audit", "--state-dir", str(tmp_path / "state")]).exception)
