"""Files of jobs that ended long ago are deleted; everything else stays."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hub_here import HubHere, agents

from kilter.errors import Mistake
from kilter.hub import hub as hub_module
from kilter.hub.job_queue import JobQueue, Kind
from kilter.hub.old_files import delete, expired_folders

YEAR_LATER = datetime.now(UTC) + timedelta(days=366)


class Jobs:
    """A queue, and a folder for each job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = JobQueue(folder / "queue.sqlite")

    def add(self, state: str, kind: Kind = "experiment", parent: int = 0) -> int:
        job = self.queue.add(kind, "x", "alice", "", ["a"], parent=parent, key="k" if parent else "")
        (self.folder / str(job)).mkdir()
        if state != "queued":
            self.queue.move(job, state)  # type: ignore[arg-type]
        return job

    def expired(self, days: float = 365.0, now: datetime = YEAR_LATER) -> list[int]:
        return sorted(int(path.name) for path in expired_folders(self.queue, self.folder, days, now))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def test_only_jobs_that_are_over_expire(jobs: Jobs) -> None:
    over = [jobs.add(state) for state in ("finished", "failed", "cancelled")]
    for state in ("queued", "waiting", "running"):
        jobs.add(state)
    assert jobs.expired() == over


def test_a_job_expires_after_so_many_days(jobs: Jobs) -> None:
    job = jobs.add("finished")
    soon = datetime.now(UTC) + timedelta(days=9.9)
    assert jobs.expired(10.0, soon) == []
    assert jobs.expired(10.0, soon + timedelta(days=0.2)) == [job]
    assert jobs.expired(0.0) == []  # keep forever


@pytest.mark.parametrize("run_state", ["queued", "running", "finished"])
def test_a_study_expires_with_its_runs(jobs: Jobs, run_state: str) -> None:
    study = jobs.add("failed", "study")
    run = jobs.add(run_state, "run", study)
    assert jobs.expired() == ([study, run] if run_state == "finished" else [])


def test_a_run_of_a_study_that_goes_on_stays(jobs: Jobs) -> None:
    study = jobs.add("running", "study")
    jobs.add("finished", "run", study)
    assert jobs.expired() == []


def test_what_the_queue_does_not_know_stays(jobs: Jobs) -> None:
    (jobs.folder / "77").mkdir()
    (jobs.folder / "notes").mkdir()
    assert jobs.expired() == []


def test_a_folder_that_cannot_be_deleted_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    delete(tmp_path / "5")
    assert "the files of job 5 cannot be deleted" in caplog.text


def test_the_hub_deletes_old_files_and_says_so(here: HubHere, monkeypatch: pytest.MonkeyPatch) -> None:
    agents(here)
    job = here.submit()
    here.until(lambda: here.processes)
    folder = here.folder / f"state/jobs/{job}"
    here.end_process(0, result=folder / "run/summary.json")
    here.until(lambda: here.state(job) == "finished")
    assert here.client().fetch(job, here.folder / "fetched") == 1

    monkeypatch.setattr(hub_module, "expired_folders", lambda *_: [folder])  # as if a year had passed
    monkeypatch.setattr(here.hub, "_next_sweep", 0.0)
    here.until(lambda: not folder.exists())
    assert here.state(job) == "finished"  # the list still has it
    with pytest.raises(Mistake, match="files of job 1 are deleted: this hub keeps them for 365 days"):
        here.client().fetch(job, here.folder / "again")
    with pytest.raises(Mistake, match="are deleted"):
        list(here.client().logs(job, follow=False))
