"""Models of finished runs for sites that were away: who lacks them, when they are sent, and that it works over a hub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from hub_place import EXPERIMENT, HubPlace

from kilter.hub import late_models
from kilter.hub.job_queue import JobQueue, QueuedJob
from kilter.hub.late_models import MOST_TRIES, LateModels
from kilter.inference.model_folder import load_model


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LateModels, JobQueue, list[int]]:
    """A queue with a finished run of the sites a, b and c, whose models only a has, and the jobs that are started."""
    monkeypatch.setattr(late_models, "PAUSE", 0.0)
    queue, started = JobQueue(tmp_path / "queue.sqlite"), []
    job = queue.add("experiment", "run", "alice", "", ["a", "b", "c"])
    queue.move(job, "running")
    queue.move(job, "finished")
    write(tmp_path, ["a"])

    async def start(job: QueuedJob, seconds: str) -> object:
        started.append(job.id)
        return object()

    return LateModels(queue, lambda job: tmp_path, start, 2), queue, started  # type: ignore[arg-type]


def write(folder: Path, received: list[str], topology: str = "star") -> None:
    (folder / "summary.json").write_text(json.dumps({"received": received, "topology": topology}))


def test_models_are_sent_when_a_site_is_back_and_only_to_those_without(late, tmp_path: Path) -> None:
    models, queue, started = late
    asyncio.run(models.step(["a"]))
    assert started == []
    asyncio.run(models.step(["a", "b"]))
    asyncio.run(models.step(["a", "b"]))  # the process runs already
    assert started == [1]
    assert [models.of(name) for name in "abc"] == [[], [1], [1]]
    write(tmp_path, ["a", "b"])
    models.ended(queue.get(1))
    assert models.missing == {1: ["c"]}
    assert models.of("c") == []


def test_a_site_that_cannot_take_them_is_not_tried_for_ever(late) -> None:
    models, queue, started = late
    for _ in range(MOST_TRIES + 5):
        asyncio.run(models.step(["b"]))
        models.ended(queue.get(1))
    assert len(started) == MOST_TRIES


def test_runs_without_files_and_runs_whose_sites_have_the_models_are_left_alone(late, tmp_path: Path) -> None:
    models, queue, started = late
    (tmp_path / "summary.json").unlink()
    asyncio.run(models.step(["b"]))
    assert (models.missing, started) == ({}, [])
    write(tmp_path, [], "rotating")
    models.remember(queue.get(1))
    assert models.missing == {}


def test_an_agent_that_was_away_at_the_end_receives_the_models_when_it_is_back(
    hub_place: Callable[..., HubPlace],
) -> None:
    here = hub_place()
    here.start_hub()
    for site in here.sites:
        here.start_agent(site)
    job = here.submit(tomli_w.dumps({**EXPERIMENT, "rounds": 30}), quorum=1, grace=0.5)
    here.until(job, "running")
    here.hub.until("job 1 .* runs as process")
    while here.view(job).rounds < 2:
        pass
    here.agents["b"].kill()
    here.until(job, "finished")
    summary = here.run_folder(job) / "summary.json"
    assert json.loads(summary.read_text())["received"] == ["a"]
    here.kill_and_restart("hub")
    here.restart_agent("b")
    here.hub.until("job 1: sending its models to b")
    here.agents["b"].until("run 1 is finished")
    assert sorted(json.loads(summary.read_text())["received"]) == ["a", "b"]
    (folder,) = (here.folder / "state-b/runs/1/models").iterdir()
    assert load_model(folder, "last").params.keys() == load_model(here.run_folder(job), "last").params.keys()
    assert here.view(job).state == "finished"
