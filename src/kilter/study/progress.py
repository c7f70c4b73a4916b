"""The progress of a study: a live display on a terminal, one line for each finished run elsewhere. It starts no threads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kilter.records.display import duration, percent
from kilter.study.grid import Job
from kilter.study.runner import RunStatus


class StudyProgress:
    """Shows how many runs are done, the time left, and the accuracies of the runs in progress."""

    def __init__(self, console: Console, name: str) -> None:
        self.console = console
        self.name = name
        self._live: Live | None = None
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, tuple[Job, float]] = {}  # by folder: the job and when it began
        self._status: dict[str, RunStatus] = {}
        self._took: dict[tuple[str, ...], list[float]] = defaultdict(list)
        self._done = self._failed = self._total = 0
        self._at_once = 1

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def begin(self, jobs: Sequence[Job], done: int, at_once: int) -> None:
        self._waiting = {job.folder: job for job in jobs}
        self._done, self._total, self._at_once = done, done + len(jobs), max(1, at_once)
        if not self._live and jobs:
            self._print(f"{self.name}: {self._total} runs, {done} already done, {at_once} at once")

    def started(self, job: Job) -> None:
        self._waiting.pop(job.folder, None)
        self._running[job.folder] = job, time.monotonic()
        self._status[job.folder] = RunStatus()
        self.tick()

    def advanced(self, job: Job, status: RunStatus) -> None:
        """A run finished a round; in rounds without evaluation the last accuracies stay."""
        before = self._status[job.folder]
        evaluated = status.global_accuracy is not None or status.client_accuracy is not None
        self._status[job.folder] = status if evaluated else replace(before, round=status.round)

    def finished(self, job: Job, failure: str | None) -> None:
        _, began = self._running.pop(job.folder)
        status = self._status.pop(job.folder)
        took = time.monotonic() - began
        self._done += 1
        if failure is None:
            for key in self._keys(job):
                self._took[key].append(took)
        else:
            self._failed += 1
        if not self._live:
            text = f"FAILED: {failure.rstrip('.')}" if failure else f"{self._accuracy(status)}, {took:.1f} s"
            left = f"; left {duration(self.left())}" if self._waiting or self._running else ""
            self._print(f"[{self._done}/{self._total}] {job.title}: {text}{left}")

    def tick(self) -> None:
        if self._live:
            self._live.update(self._display(), refresh=True)

    def left(self) -> float | None:
        """Seconds, from how long runs like these took; None before anything is known."""
        now = time.monotonic()
        total = 0.0
        jobs = [(job, now - began) for job, began in self._running.values()] + [
            (j, 0.0) for j in self._waiting.values()
        ]
        for job, spent in jobs:
            expected = self._expected(job)
            if expected is None:
                return None
            total += max(expected - spent, 0.0)
        return total / self._at_once

    def _expected(self, job: Job) -> float | None:
        for key in self._keys(job):
            if self._took[key]:
                return sum(self._took[key]) / len(self._took[key])
        now = time.monotonic()
        guesses = [
            (now - began) * other.experiment.rounds / self._status[folder].round
            for folder, (other, began) in self._running.items()
            if self._status[folder].round
        ]
        return sum(guesses) / len(guesses) if guesses else None

    def _keys(self, job: Job) -> tuple[tuple[str, ...], ...]:
        return (job.cell.name, job.label), (job.cell.name,), ()

    def _accuracy(self, status: RunStatus) -> str:
        return f"global {percent(status.global_accuracy)}, clients {percent(status.client_accuracy)}"

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _display(self) -> RenderableType:
        failed = f", {self._failed} failed" if self._failed else ""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.name, style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=30),
            f"{self._done}/{self._total} runs{failed}",
            f"left {duration(self.left())}",
        )
        rows = Table.grid(padding=(0, 2))
        for folder, (job, _) in self._running.items():
            status = self._status[folder]
            rows.add_row(f"  {job.title}", f"round {status.round}/{job.experiment.rounds}", self._accuracy(status))
        return Group(head, rows)
