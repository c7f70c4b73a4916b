"""The queue: states change in one step or not at all, and listing is fast."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.errors import Mistake
from kilter.hub.job_queue import ACTIVE, JobQueue, RunOptions

STATES = ("queued", "waiting", "running", "finished", "failed", "cancelled")
WRITER = """
import sys
from pathlib import Path
from kilter.hub.job_queue import JobQueue
queue = JobQueue(Path(sys.argv[1]))
while True:
    job = queue.add("experiment", "x", "alice", "", ["a"])
    print("queued", job, flush=True)
    queue.move(job, "running")
    print("running", job, flush=True)
    queue.move(job, "finished")
    print("finished", job, flush=True)
"""


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    return JobQueue(tmp_path / "queue.sqlite")


def add(queue: JobQueue, owner: str = "alice") -> int:
    return queue.add("experiment", "trial", owner, "method = 'fedavg'", ["a", "b"], 1, RunOptions("digits", 5.0, 1.0))


def test_a_job_is_what_was_queued(queue: JobQueue) -> None:
    job = queue.get(add(queue))
    assert job is not None
    assert (job.state, job.sites, job.need, job.options) == ("queued", ("a", "b"), 1, RunOptions("digits", 5.0, 1.0))
    assert queue.get(99) is None


@given(moves=st.lists(st.sampled_from(STATES[1:]), max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_job_that_is_over_stays_over(moves: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    queue = JobQueue(tmp_path_factory.mktemp("queue") / "q")
    job, expected = add(queue), "queued"
    for to in moves:
        moved = queue.move(job, to)  # type: ignore[arg-type]
        assert moved == (expected in ACTIVE)
        expected = to if moved else expected
        entry = queue.get(job)
        assert entry is not None
        assert entry.state == expected
        assert bool(entry.ended) == (expected not in ACTIVE)
    assert queue.history(job)[-1][1] == expected
    queue.close()


def test_only_one_of_two_processes_makes_a_change(tmp_path: Path) -> None:
    one, two = JobQueue(tmp_path / "q"), JobQueue(tmp_path / "q")
    job = add(one)
    assert one.move(job, "running", leaving=("queued",))
    assert not two.move(job, "running", leaving=("queued",))


def test_cancelling_a_study_cancels_its_runs(queue: JobQueue) -> None:
    study = queue.add("study", "s", "alice", "", ["a"])
    runs = [queue.add("run", f"r{k}", "alice", "", ["a"], parent=study, key=f"k{k}") for k in range(3)]
    queue.move(runs[0], "finished")
    assert queue.cancel(study, "cancelled by alice") == [study, runs[1], runs[2]]
    assert queue.states_of(study) == ["finished", "cancelled", "cancelled"]


def test_a_run_of_a_study_is_queued_once(queue: JobQueue) -> None:
    study = queue.add("study", "s", "alice", "", ["a"])
    first = queue.add("run", "r", "alice", "", ["a"], parent=study, key="k")
    assert queue.add("run", "r", "alice", "", ["a"], parent=study, key="k") == first
    assert len(queue.runs_of(study)) == 1


def test_submitters_list_their_own_jobs(queue: JobQueue) -> None:
    mine, other = add(queue), add(queue, "eve")
    assert [job.id for job in queue.newest(10, "alice")] == [mine]
    assert [job.id for job in queue.newest(10)] == [other, mine]


def test_a_killed_process_loses_nothing_it_confirmed(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"q{attempt}"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(20 + 7 * attempt)]
        os.kill(writer.pid, signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.wait()
        queue = JobQueue(path)
        for line in lines:
            if line.endswith("\n"):
                state, job = line.split()
                entry = queue.get(int(job))
                assert entry is not None
                assert STATES.index(entry.state) >= STATES.index(state)
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
        queue.close()


def test_listing_a_thousand_jobs_is_fast(queue: JobQueue) -> None:
    spec = "x" * 2000
    with queue._transaction() as db:
        db.executemany(
            "INSERT INTO jobs (kind, name, owner, spec, options, sites, quorum, submitted, state)"
            " VALUES ('experiment', 'n', 'alice', ?, '{}', '[\"a\"]', 0, '2026', 'finished')",
            [(spec,)] * 1000,
        )
    began = time.perf_counter()
    assert len(queue.newest(1000, "alice")) == 1000
    assert time.perf_counter() - began < 0.3


def test_a_queue_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    JobQueue(tmp_path / "q").close()
    sqlite3.connect(tmp_path / "q").execute("PRAGMA user_version=99")
    with pytest.raises(Mistake, match="newer release"):
        JobQueue(tmp_path / "q")


def test_a_file_that_is_no_queue_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "q").write_text("not a database, but long enough to look like one" * 100)
    with pytest.raises(Mistake, match="cannot be used"):
        JobQueue(tmp_path / "q")
