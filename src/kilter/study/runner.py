"""Carries out the runs of a study, as many at once as there are cores: one forked process for each run.

The parent imports everything and loads the data before it forks, and starts no threads. A child ends when its parent does. A run
that was interrupted resumes from its checkpoint; a finished run is not repeated.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from kilter.data import Dataset
from kilter.data.preparation import FILE as PREPARATION_FILE
from kilter.errors import Mistake
from kilter.experiment import DATA_FIELDS, Experiment
from kilter.federate import Watch
from kilter.records.run_folder import CHECKPOINT, Store, write
from kilter.records.types import Round
from kilter.study.extension import copy_run, shorter_run
from kilter.study.folder import Folder
from kilter.study.grid import Job

TICK = 0.5  # seconds between updates of the display
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class RunStatus:
    """What a run's process tells the study after each round, or when it fails."""

    round: int = 0
    global_accuracy: float | None = None
    client_accuracy: float | None = None
    failure: str | None = None


class Watcher(Protocol):
    """Shows the progress of a study."""

    def begin(self, jobs: Sequence[Job], done: int, at_once: int) -> None: ...
    def started(self, job: Job) -> None: ...
    def advanced(self, job: Job, status: RunStatus) -> None: ...
    def finished(self, job: Job, failure: str | None) -> None: ...
    def tick(self) -> None: ...


@dataclass(frozen=True)
class FailedRun:
    """A run that did not finish, and why."""

    job: Job
    reason: str


@lru_cache(maxsize=4)
def loaded(*values: Any) -> Dataset:
    """A data set, loaded once for all runs. The values are those of DATA_FIELDS."""
    return Experiment(**dict(zip(DATA_FIELDS, values, strict=True))).dataset()


def preload(experiment: Experiment) -> Dataset:
    """The data set of an experiment, loaded once."""
    return loaded(*(getattr(experiment, name) for name in DATA_FIELDS))


class PreloadedExperiment(Experiment):
    """An experiment that uses data which is already loaded."""

    def dataset(self) -> Dataset:
        return preload(self)


def carry_out(jobs: Sequence[Job], folder: Folder, at_once: int, watcher: Watcher) -> list[FailedRun]:
    """Run the jobs that are not done yet. A failed run does not stop the others."""
    unique = list({job.folder: job for job in jobs}.values())
    waiting = [job for job in unique if not folder.is_done(job)]
    watcher.begin(waiting, len(unique) - len(waiting), at_once)
    torch.set_num_threads(1)  # before anything is computed: forked children must find no pool of threads
    queue = RunQueue(waiting, folder, watcher)
    try:
        while queue.waiting or queue.running:
            while queue.waiting and len(queue.running) < at_once:
                queue.start_next()
            queue.receive()
            watcher.tick()
    finally:
        queue.stop()
    return queue.failures


@dataclass
class RunQueue:
    """Runs that wait, and runs in processes of their own."""

    waiting: list[Job]
    folder: Folder
    watcher: Watcher
    running: dict[Connection, tuple[Job, BaseProcess]] = field(default_factory=dict)
    failures: list[FailedRun] = field(default_factory=list)
    _reasons: dict[Connection, str] = field(default_factory=dict)

    def start_next(self) -> None:
        """Start the first run that waits."""
        job = self.waiting.pop(0)
        self.watcher.started(job)
        try:
            preload(job.experiment)
        except Mistake as e:
            self._finish(job, str(e))
            return
        pipe, process = _start(job, self.folder.run(job), list(self.running))
        self.running[pipe] = job, process

    def receive(self) -> None:
        """Wait for messages of the processes, at most TICK seconds."""
        for pipe in wait(list(self.running), TICK):
            assert isinstance(pipe, Connection)
            job, process = self.running[pipe]
            try:
                status = msgspec.json.decode(pipe.recv_bytes(), type=RunStatus)
            except (EOFError, OSError):
                process.join()
                del self.running[pipe]
                pipe.close()
                reason = self._reasons.pop(pipe, None)
                if reason is None and not self.folder.is_done(job):
                    reason = _how_it_died(process.exitcode)
                self._finish(job, reason)
                continue
            if status.failure is not None:
                self._reasons[pipe] = status.failure
            else:
                self.watcher.advanced(job, status)

    def _finish(self, job: Job, reason: str | None) -> None:
        if reason is not None:
            self.failures.append(FailedRun(job, reason))
        self.watcher.finished(job, reason)

    def stop(self) -> None:
        """Kill the processes that still run. Run folders are consistent at any time."""
        for _, process in self.running.values():
            process.kill()
        for _, process in self.running.values():
            process.join()


def _how_it_died(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (perhaps out of memory: use fewer --jobs)" if code == -signal.SIGKILL else ""
        return f"its process was killed by signal {-code}{hint}"
    return f"its process ended with code {code} and without a result"


def _start(job: Job, folder: Path, others: list[Connection]) -> tuple[Connection, BaseProcess]:
    if not hasattr(os, "fork"):
        raise Mistake("Studies need an operating system that can fork: use Linux or macOS.")
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, folder, theirs, [mine, *others], os.getpid()), daemon=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    theirs.close()
    return mine, process


def _work(job: Job, folder: Path, pipe: Connection, foreign: list[Connection], parent: int) -> None:
    """The child process: one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    for other in foreign:  # the parent's ends, inherited by the fork
        other.close()

    def tell(status: RunStatus) -> None:
        pipe.send_bytes(msgspec.json.encode(status))

    def watch(record: Round) -> None:
        if os.getppid() != parent:
            os._exit(1)
        client = record.client_accuracy
        tell(RunStatus(record.round, record.global_accuracy, client.mean if client else None))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _redirect_output(folder / "output.txt")
        run_one(job.experiment, folder, watch)
        with suppress(OSError):
            (folder / "error.txt").unlink(missing_ok=True)
            sys.stdout.flush()
            if not (folder / "output.txt").stat().st_size:
                (folder / "output.txt").unlink()
    except Mistake as e:
        tell(RunStatus(failure=str(e)))
    except Exception as e:
        text = "".join(traceback.format_exception(e))
        with suppress(OSError):
            (folder / "error.txt").write_text(text)
        tell(RunStatus(failure=f"{type(e).__name__}: {e} (see {folder / 'error.txt'})"))


def run_one(experiment: Experiment, folder: Path, watch: Watch) -> None:
    """One run in this process, from its checkpoint if it has one, or from a finished run with fewer rounds."""
    datasets: list[Dataset] = []
    method, fed = PreloadedExperiment(**vars(experiment)).build(workers=1, inspect=datasets.append)
    with fed:
        if not (folder / CHECKPOINT).exists() and not method.depends_on_rounds():
            shorter = shorter_run(experiment, folder)
            if shorter is not None:
                copy_run(shorter, folder)
        store = Store(folder)
        if not (folder / "experiment.toml").exists():
            write(folder / "experiment.toml", experiment.write())
        if datasets[0].schema is not None:
            write(folder / "schema.toml", datasets[0].schema.text())
        if datasets[0].preparation is not None:
            write(folder / PREPARATION_FILE, datasets[0].preparation.text())
        experiment.run(method, fed, store, watch, extend=True)
        store.close()


def _die_with(parent: int) -> None:
    """End when the parent does, even by SIGKILL. Elsewhere than on Linux the child notices after its next round."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _redirect_output(path: Path) -> None:
    """Send what a method prints to a file, so that it does not disturb the display."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
