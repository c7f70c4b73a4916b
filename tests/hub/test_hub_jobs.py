"""What becomes of jobs in a hub: when they run, when their processes end, and when the hub itself is in trouble."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hub_here import SITES, FakeAgent, HubHere, agents

from kilter.errors import Mistake
from kilter.hub import hub as hub_module
from kilter.hub.config import HubConfig
from kilter.hub.hub import Hub
from kilter.hub.messages import SiteReport


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
