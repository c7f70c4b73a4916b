"""A study whose runs go through the queue gives the tables of a simulated one, tuning included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hub_place import EXPERIMENT, HubPlace
from rich.console import Console

from kilter import data as kdata
from kilter.experiment import Experiment
from kilter.hub.job_queue import JobQueue, QueuedJob
from kilter.hub.network_study import QueuedRuns, find_study
from kilter.net.terms import own_data
from kilter.records.run_folder import Store, write
from kilter.runtimes.simulation import Simulation
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.pipeline import conduct
from kilter.study.results import Results, tabulate
from kilter.study.runner import FailedRun, Watcher
from kilter.study.tables import markdown

COMMON = {k: v for k, v in EXPERIMENT.items() if k not in ("method", "seed")}
PLAIN: dict[str, Any] = {"name": "s", "methods": ["fedavg", "fedprox"], "seeds": [3], "experiment": COMMON}
TUNED = {**PLAIN, "methods": ["fedavg"], "tune": {"lr": [0.05, 0.1]}}
QUIET = Console(quiet=True)


def simulate_run(experiment: Experiment, folder: Path, clients: dict[str, Any]) -> None:
    """One run with the rows of these sites, in this process."""
    split = experiment.split()
    store = Store(folder)
    write(folder / "experiment.toml", experiment.write())
    options: dict[str, Any] = {"seed": experiment.seed, "stack": False, "bench": split.test, "public": split.public}
    with Simulation(clients, **options) as fed:
        experiment.run(experiment.make((1, 8, 8), 10), fed, store)
    store.close()


def sites_of(experiment: Experiment, files: dict[str, Path]) -> dict[str, Any]:
    return {n: own_data(kdata.load(f), n, experiment.seed, experiment.valid) for n, f in files.items()}


class SimulatedRuns:
    """Carries out the runs of a study in this process."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    def __call__(self, jobs: Sequence[Job], folder: Folder, at_once: int, watcher: Watcher) -> list[FailedRun]:
        for job in jobs:
            if not folder.is_done(job):
                simulate_run(job.experiment, folder.run(job), sites_of(job.experiment, self.files))
        return []


def without_clock(study: Study, results: Results) -> str:
    """The tables of a study, with what depends on the clock and the machine left out."""
    runs = {
        (cell.cell.name, line.label): [replace(run, seconds=0.0, versions={}) for run in line.runs]
        for cell in results.cells
        for line in cell.lines
    }
    choices = {(choice.cell, choice.label): choice for choice in results.choices}
    return markdown(tabulate(study, runs, results.failures, choices, results.budget))


@contextmanager
def worker(queue_path: Path, work: Callable[[QueuedJob], str]) -> Iterator[list[int]]:
    """A thread in place of the hub: carries out queued runs; `work` returns why a run failed, or nothing."""
    over, done = threading.Event(), []

    def loop() -> None:
        queue = JobQueue(queue_path)
        while not over.wait(0.02):
            for job in queue.active():
                if job.kind == "run":
                    queue.move(job.id, "running")
                    reason = work(job)
                    queue.move(job.id, "failed" if reason else "finished", reason)
                    done.append(job.id)
        queue.close()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    from place import site_files

    site_files(tmp_path, ("a", "b"))
    return {name: tmp_path / f"{name}.npz" for name in ("a", "b")}


@pytest.mark.parametrize("values", [PLAIN, TUNED], ids=["plain", "tuned"])
def test_the_queue_changes_no_table(values: dict[str, Any], files: dict[str, Path], tmp_path: Path) -> None:
    study = Study.of(values)
    queue = JobQueue(tmp_path / "q")
    number = queue.add("study", "s", "alice", "", ["a", "b"])
    folder = tmp_path / "study"

    def work(job: QueuedJob) -> str:
        (tmp_path / f"{job.id}.toml").write_text(job.spec)
        experiment = Experiment.read(tmp_path / f"{job.id}.toml")
        simulate_run(experiment, folder / "runs" / job.key, sites_of(experiment, files))
        return ""

    with worker(tmp_path / "q", work) as done, Folder(folder) as locked:
        queued = conduct(study, locked, 2, QUIET, QueuedRuns(queue, find_study(queue, number)))
        again = conduct(study, locked, 2, QUIET, QueuedRuns(queue, find_study(queue, number)))
    assert len(done) == len(queue.runs_of(number)) == (2 if values is PLAIN else 3)  # nothing twice
    with Folder(tmp_path / "simulated") as locked:
        simulated = conduct(study, locked, 1, QUIET, SimulatedRuns(files))
    assert without_clock(study, queued) == without_clock(study, simulated) == without_clock(study, again)


def test_a_failed_run_is_named_and_the_others_go_on(files: dict[str, Path], tmp_path: Path) -> None:
    study = Study.of(PLAIN)
    queue = JobQueue(tmp_path / "q")
    number = queue.add("study", "s", "alice", "", ["a", "b"])
    folder = tmp_path / "study"

    def work(job: QueuedJob) -> str:
        if "fedprox" in job.key:
            return "b does not take part: only allows fedavg"
        (tmp_path / "e.toml").write_text(job.spec)
        experiment = Experiment.read(tmp_path / "e.toml")
        simulate_run(experiment, folder / "runs" / job.key, sites_of(experiment, files))
        return ""

    with worker(tmp_path / "q", work), Folder(folder) as locked:
        results = conduct(study, locked, 2, QUIET, QueuedRuns(queue, find_study(queue, number)))
    assert [f.reason for f in results.failures] == ["b does not take part: only allows fedavg"]
    assert "fedavg" in markdown(results)


@pytest.mark.slow
def test_a_study_over_the_network_gives_the_table_of_a_simulated_one(hub_place: Callable[..., HubPlace]) -> None:
    here = hub_place()
    here.start_hub()
    for site in here.sites:
        here.start_agent(site)
    job = here.submit(tomli_w.dumps(PLAIN))
    here.until(job, "finished", seconds=200)
    study = Study.of(PLAIN)
    files = {site: here.folder / f"{site}.npz" for site in here.sites}
    with Folder(here.folder / "simulated") as locked:
        simulated = conduct(study, locked, 1, QUIET, SimulatedRuns(files))
    with Folder(here.folder / f"hub-state/jobs/{job}/study") as locked:
        real = conduct(study, locked, 1, QUIET, SimulatedRuns(files))  # all runs are done: only the tables are made
    assert without_clock(study, real) == without_clock(study, simulated)
