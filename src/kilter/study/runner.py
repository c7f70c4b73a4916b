"""The runs of a study, as many at once as there are cores: one forked process a run, each an ordinary run folder.

The parent has imported everything and loaded the data before it forks, and starts no threads; a child that loses its parent
ends at once. A run that was cut off goes on from its checkpoint, a finished one is not run again.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from kilter.data import Dataset
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.records.run_folder import Store, cannot_write, write
from kilter.study.grid import Job

PATIENCE = 20.0  # seconds to wait for processes of a killed study to end
TICK = 0.5  # seconds between looks at the clock
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class Watcher(Protocol):
    """Who is told how a study goes."""

    def begin(self, jobs: Sequence[Job], done: int, at_once: int) -> None: ...
    def started(self, job: Job) -> None: ...
    def advanced(self, job: Job, record: dict[str, Any]) -> None: ...
    def finished(self, job: Job, failure: str | None) -> None: ...
    def tick(self) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A run that did not end, and why."""

    job: Job
    reason: str


@lru_cache(maxsize=4)
def loaded(data: str, rows: int) -> Dataset:
    """A data set, loaded once for all runs that follow."""
    return Experiment(data=data, rows=rows).dataset()


class Shared(Experiment):
    """An experiment that takes its data from what is already loaded."""

    def dataset(self) -> Dataset:
        return loaded(self.data, self.rows)


class Folder:
    """A study's folder, held by one study at a time; processes it left behind hold it too, until they are gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise Mistake(f"'{path}' is a file: choose another folder with --out.")
        if (path / "experiment.toml").exists():
            raise Mistake(f"'{path}' holds a single run: choose another folder with --out.")
        if (
            path.is_dir()
            and any(path.iterdir())
            and not (path / "study.toml").exists()
            and not (path / ".lock").exists()
        ):
            raise Mistake(f"'{path}' is not empty and no study's folder: choose another with --out.")
        try:
            (path / "runs").mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115 - held as long as the study runs
        except OSError as e:
            raise cannot_write(path, e) from None

    def __enter__(self) -> Self:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self
            except OSError:
                if time.monotonic() > until:
                    raise Mistake(
                        f"Another study is running in '{self.path}': wait for it, or choose another --out."
                    ) from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def run(self, job: Job) -> Path:
        """Where a job's run lies."""
        return self.path / "runs" / job.folder

    def is_done(self, job: Job) -> bool:
        """summary.json is the last file a run writes."""
        return (self.run(job) / "summary.json").exists()


def carry_out(jobs: Sequence[Job], folder: Folder, at_once: int, watcher: Watcher) -> list[Failure]:
    """Run what is not yet done; a failed run does not stop the others."""
    unique = list({job.folder: job for job in jobs}.values())
    queue = [job for job in unique if not folder.is_done(job)]
    watcher.begin(queue, len(unique) - len(queue), at_once)
    torch.set_num_threads(1)  # before anything is computed: forked children must find no pool of threads
    failures: list[Failure] = []
    running: dict[Connection, tuple[Job, BaseProcess]] = {}
    reasons: dict[Connection, str] = {}
    try:
        while queue or running:
            while queue and len(running) < at_once:
                job = queue.pop(0)
                watcher.started(job)
                try:
                    loaded(job.experiment.data, job.experiment.rows)
                except Mistake as e:
                    failures.append(Failure(job, str(e)))
                    watcher.finished(job, str(e))
                    continue
                pipe, process = _start(job, folder.run(job), list(running))
                running[pipe] = job, process
            for ready in wait(list(running), TICK):
                assert isinstance(ready, Connection)
                pipe = ready
                job, process = running[pipe]
                try:
                    message = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    process.join()
                    del running[pipe]
                    pipe.close()
                    reason = reasons.pop(pipe, None)
                    if reason is None and not folder.is_done(job):
                        reason = _how_it_died(process.exitcode)
                    if reason is not None:
                        failures.append(Failure(job, reason))
                    watcher.finished(job, reason)
                else:
                    if "failed" in message:
                        reasons[pipe] = message["failed"]
                    else:
                        watcher.advanced(job, message)
            watcher.tick()
    finally:
        for _, process in running.values():  # whatever stopped us: runs are whole at every instant
            process.kill()
        for _, process in running.values():
            process.join()
    return failures


def _how_it_died(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (out of memory, perhaps: use fewer --jobs)" if code == -signal.SIGKILL else ""
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
    """A child's life: one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    for other in foreign:  # the parent's ends, inherited by the fork
        other.close()

    def tell(**message: Any) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    def watch(record: dict[str, Any]) -> None:
        if os.getppid() != parent:
            os._exit(1)
        accuracy = {k: (record[k] or {}).get("accuracy") for k in ("global", "client")}
        if isinstance(accuracy["client"], dict):
            accuracy["client"] = accuracy["client"]["mean"]
        tell(round=record["round"], **accuracy)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _speak_into(folder / "output.txt")
        run_one(job.experiment, folder, watch)
        with suppress(OSError):
            (folder / "error.txt").unlink(missing_ok=True)
            sys.stdout.flush()
            if not (folder / "output.txt").stat().st_size:
                (folder / "output.txt").unlink()
    except Mistake as e:
        tell(failed=str(e))
    except Exception as e:
        text = "".join(traceback.format_exception(e))
        with suppress(OSError):
            (folder / "error.txt").write_text(text)
        tell(failed=f"{type(e).__name__}: {e} (see {folder / 'error.txt'})")


def run_one(experiment: Experiment, folder: Path, watch: Callable[[dict[str, Any]], None]) -> None:
    """One run in this process, from its checkpoint if it has one."""
    shared = Shared(**vars(experiment))
    method, fed = shared.build(workers=1)
    with fed:
        store = Store(folder)
        if not (folder / "experiment.toml").exists():
            write(folder / "experiment.toml", experiment.write())
        experiment.run(method, fed, store, watch)
        store.close()


def _die_with(parent: int) -> None:
    """End when the parent does, even by SIGKILL. Elsewhere than on Linux the next round's end notices."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _speak_into(path: Path) -> None:
    """What a method prints must not tear the display apart."""
    found = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(found, 1)
    os.dup2(found, 2)
    os.close(found)
