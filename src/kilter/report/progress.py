"""A run as it goes: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


def accuracy(found: tuple[float, float | None] | None) -> str:
    """Mean and deviation in per cent.

    >>> accuracy((0.51, 0.012)), accuracy((0.51, None)), accuracy(None)
    ('51.0 ± 1.2', '51.0', '-')
    """
    if found is None:
        return "-"
    mean, std = found
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def size(n: float) -> str:
    """Bytes for people: powers of 1000.

    >>> size(999), size(1_234_567)
    ('999 B', '1.23 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def percent(value: float | None) -> str:
    """An accuracy for people."""
    return "-" if value is None else f"{100 * value:.1f} %"


class Progress:
    """Watches a run's records: round, accuracies, loss, traffic, time left."""

    def __init__(self, rounds: int, console: Console) -> None:
        self.rounds = rounds
        self.console = console
        self.traffic = 0
        self._began = time.monotonic()
        self._seen = 0
        self._accuracy: tuple[str, str] = ("-", "-")
        self._bar: Bar | None = None
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
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

    def see(self, record: dict[str, Any]) -> None:
        """One more round is done."""
        self.traffic += record["bytes_up"] + record["bytes_down"]
        if record["global"] or record["client"]:
            client = (record["client"] or {}).get("accuracy") or {}
            self._accuracy = percent((record["global"] or {}).get("accuracy")), percent(client.get("mean"))
        loss = "-" if record["loss"] is None else f"{record['loss']:.4f}"
        lost = f"  failures {len(record['failures'])}" if record["failures"] else ""
        text = (
            f"global {self._accuracy[0]}  clients {self._accuracy[1]}  loss {loss}  traffic {size(self.traffic)}{lost}"
        )
        if self._bar:
            self._bar.update(self._task, completed=record["round"], text=text)
            return
        self._seen += 1
        left = (time.monotonic() - self._began) / self._seen * (self.rounds - record["round"])
        self.console.print(f"round {record['round']}/{self.rounds}  {text}  left {left:.0f} s", soft_wrap=True)
