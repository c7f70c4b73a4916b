"""A study whose runs go through the queue of a hub. The same grid, tuning and tables as in simulation; only the runs are real.

The driver is a process of its own. It queues the study's runs, waits until they are over, and gathers the results from their run
folders. Killed at any moment, it starts again, finds its runs in the queue by their folder, and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kilter.errors import Mistake
from kilter.hub.job_queue import ACTIVE, JobQueue, QueuedJob
from kilter.records.run_folder import read_rounds
from kilter.records.toml_file import read_toml
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.runner import FailedRun, RunStatus, Watcher

TICK = 0.5  # seconds between two looks at the queue


class QueuedRuns:
    """Carries out the runs of a study by queueing them; stands in for `kilter.study.runner.carry_out`."""

    def __init__(self, queue: JobQueue, study: QueuedJob) -> None:
        self.queue, self.study = queue, study

    def __call__(self, jobs: Sequence[Job], folder: Folder, at_once: int, watcher: Watcher) -> list[FailedRun]:
        unique = list({job.folder: job for job in jobs}.values())
        waiting = {self._add(job): job for job in unique if not folder.is_done(job)}
        watcher.begin(list(waiting.values()), len(unique) - len(waiting), at_once)
        started: set[int] = set()
        failures = []
        while waiting:
            for number, job in list(waiting.items()):
                entry = self.queue.get(number)
                assert entry is not None
                if entry.state not in ("queued", "waiting") and number not in started:
                    started.add(number)
                    watcher.started(job)
                if entry.state in ACTIVE:
                    continue
                reason = None if folder.is_done(job) else entry.reason or entry.state
                if reason is None:
                    watcher.advanced(job, last_status(folder.run(job)))
                failures += [] if reason is None else [FailedRun(job, reason)]
                watcher.finished(job, reason)
                del waiting[number]
            watcher.tick()
            time.sleep(TICK if waiting else 0.0)
        return failures

    def _add(self, job: Job) -> int:
        study = self.study
        return self.queue.add(
            "run",
            f"{study.name}: {job.title}"[:80],
            study.owner,
            job.experiment.write(),
            study.sites,
            study.quorum,
            study.options,
            rounds=job.experiment.rounds,
            parent=study.id,
            key=job.folder,
        )


def last_status(folder: Path) -> RunStatus:
    """What a finished run says in the progress of its study."""
    last = read_rounds(folder)[-1]
    return RunStatus(last.round, last.global_accuracy, last.client_accuracy.mean if last.client_accuracy else None)


def find_study(queue: JobQueue, number: int) -> QueuedJob:
    job = queue.get(number)
    if job is None or job.kind != "study":
        raise Mistake(f"Job {number} of '{queue.path}' is not a study.")
    return job


def drive(queue_path: Path, number: int, spec: Path, out: Path) -> None:
    """Run a study to its end and write its results."""
    from rich.console import Console

    from kilter.report.study_page import publish
    from kilter.study.pipeline import conduct

    queue = JobQueue(queue_path)
    job = find_study(queue, number)
    study = Study.of(read_toml(spec), job.options.preset, name=job.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with Folder(out) as folder:
        console = Console(highlight=False)
        results = conduct(study, folder, len(job.sites), console, QueuedRuns(queue, job))
        publish(results, out, f"kilter submit {study.name}")
    queue.close()
    if results.failures:
        raise Mistake(f"{len(results.failures)} runs failed, the first because: {results.failures[0].reason}")
