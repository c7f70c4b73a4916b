"""A study as it goes: one live display on a terminal, one line a finished run elsewhere. It starts no threads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kilter.report.progress import percent
from kilter.study.grid import Job


def duration(seconds: float | None) -> str:
    """Seconds for people.

    >>> duration(42), duration(200), duration(7300), duration(None)
    ('42 s', '3 min 20 s', '2 h 1 min', 'not yet known')
    """
    if seconds is None:
        return "not yet known"
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60} min"


class Board:
    """Runs done, time left, and the accuracies of the runs under way."""

    def __init__(self, console: Console, name: str) -> None:
        self.console = console
        self.name = name
        self._live: Live | None = None
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, tuple[Job, float]] = {}  # by folder: the job and when it began
        self._at: dict[str, dict[str, Any]] = {}
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
            self._say(f"{self.name}: {self._total} runs, {done} already done, {at_once} at once")

    def started(self, job: Job) -> None:
        self._waiting.pop(job.folder, None)
        self._running[job.folder] = job, time.monotonic()
        self._at[job.folder] = {"round": 0}
        self.tick()

    def advanced(self, job: Job, record: dict[str, Any]) -> None:
        seen = {k: v for k, v in record.items() if v is not None}
        self._at[job.folder] |= seen

    def finished(self, job: Job, failure: str | None) -> None:
        _, began = self._running.pop(job.folder)
        at = self._at.pop(job.folder)
        took = time.monotonic() - began
        self._done += 1
        if failure is None:
            for key in self._keys(job):
                self._took[key].append(took)
        else:
            self._failed += 1
        if not self._live:
            text = f"FAILED: {failure}" if failure else f"{self._accuracy(at)}, {took:.1f} s"
            left = f"; left {duration(self.left())}" if self._waiting or self._running else ""
            self._say(f"[{self._done}/{self._total}] {job.title}: {text}{left}")

    def tick(self) -> None:
        if self._live:
            self._live.update(self._shown(), refresh=True)

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
            (now - began) * other.experiment.rounds / self._at[folder]["round"]
            for folder, (other, began) in self._running.items()
            if self._at[folder]["round"]
        ]
        return sum(guesses) / len(guesses) if guesses else None

    def _keys(self, job: Job) -> tuple[tuple[str, ...], ...]:
        return (job.cell.name, job.label), (job.cell.name,), ()

    def _accuracy(self, at: dict[str, Any]) -> str:
        return f"global {percent(at.get('global'))}, clients {percent(at.get('client'))}"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _shown(self) -> RenderableType:
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
            at = self._at[folder]
            rows.add_row(f"  {job.title}", f"round {at['round']}/{job.experiment.rounds}", self._accuracy(at))
        return Group(head, rows)
