"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kilter.records.display import metric, size
from kilter.records.types import Round

NARROW, WIDE = 56, 132  # columns below which there is no bar, and below which the text is short


class Progress:
    """Shows a run's round, accuracies, loss, traffic and time left."""

    def __init__(self, rounds: int, console: Console, main: str = "accuracy") -> None:
        self.rounds = rounds
        self.main = main  # the metric to show
        self.console = console
        self.traffic = 0
        self._began = time.monotonic()
        self._done = 0
        self._accuracy: tuple[str, str] = ("-", "-")
        self._bar: Bar | None = None
        if console.is_terminal:
            bar = [] if console.width < NARROW else [BarColumn(bar_width=20 if console.width < WIDE else 40)]
            self._bar = Bar(
                TextColumn("round"), MofNCompleteColumn(), *bar, TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
                console=console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=rounds, text="setting up")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def see(self, record: Round) -> None:
        """Show that one more round is done."""
        self.traffic += record.bytes_up + record.bytes_down
        if record.global_metrics or record.client:
            client, overall = record.client.get(self.main), (record.global_metrics or {}).get(self.main)
            self._accuracy = metric(self.main, overall), metric(self.main, client.mean if client else None)
        loss = "-" if record.loss is None else f"{record.loss:.4f}"
        lost = f"  failures {len(record.failures)}" if record.failures else ""
        shown = "" if self.main == "accuracy" else f"{self.main}: "
        text = f"{shown}global {self._accuracy[0]}  clients {self._accuracy[1]}  loss {loss}  traffic {size(self.traffic)}{lost}"
        if self._bar:
            if self.console.width < WIDE:
                text = f"{self._accuracy[0]}  loss {loss}"
            self._bar.update(self._task, completed=record.round, text=text)
            return
        self._done += 1
        if record.round:  # how long the set-up took says nothing about rounds
            seconds = (time.monotonic() - self._began) / self._done * (self.rounds - record.round)
            text = f"{text}  left {seconds:.0f} s"
        self.console.print(f"round {record.round}/{self.rounds}  {text}", soft_wrap=True)
