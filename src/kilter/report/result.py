"""A finished run in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kilter.errors import Mistake
from kilter.records import checksums
from kilter.report.progress import percent, size


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's summary.json, or a Mistake."""
    try:
        data = (folder / "summary.json").read_bytes()
        checksums.verify(folder, "summary.json", data)
        found: dict[str, Any] = json.loads(data)
    except (OSError, ValueError):
        raise Mistake(f"'{folder}' holds no finished run: its summary.json is missing or damaged.") from None
    return found


def show_result(folder: Path, console: Console) -> None:
    """The table, the pictures of who listens to whom where peers choose, and where the files are."""
    from kilter.report.trust import draw

    console.print(result_table(folder))
    if made := draw(folder):
        console.print(f"Who listens to whom: {', '.join(map(str, made))}", soft_wrap=True)
    console.print(f"Files: {folder}")


def _workers(shared: Mapping[str, int]) -> str:
    """How many processes trained, by what `--workers auto` found or was told."""
    found = sorted(set(shared.values()))
    return f" on {found[-1]} worker{'s' * (found[-1] > 1)}" if found else ""


def _phases(seconds: dict[str, float]) -> str:
    """What each phase of training took.

    >>> _phases({"paint": 1.25, "train": 3.0})
    'paint 1.2 s, train 3.0 s'
    """
    return ", ".join(f"{step} {s:.1f} s" for step, s in seconds.items())


def result_table(folder: Path) -> Table:
    """What came out, last and best round by their names."""
    s = read_summary(folder)
    table = Table(
        title=f"{s['method']}, {s['rounds']} rounds, seed {s['seed']}",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for heading in ("", "round", "global", "clients: mean", "std", "min", "max", "worst tenth"):
        table.add_column(heading, justify="left" if not heading else "right")
    parts = ("mean", "std", "min", "max", "worst_decile")
    local = False
    for name, part in (("last round", s["last"]), ("best on validation", s["best"])):
        if "round" in part:
            c = part["client_accuracy"] or {}
            spread = [percent(c.get(k)) for k in parts]
            table.add_row(name, str(part["round"]), percent(part["global_accuracy"]), *spread)
            for which, over in part.get("bench", {}).items():
                if which == "local" or over["min"] < over["max"]:  # one model for all is the same everywhere
                    table.add_row(f"  {which}", "", "", *[percent(over[k]) for k in parts])
                    local |= which == "local"
            for which, found in part.get("variants", {}).items():
                table.add_row(f"  {which}", "", percent(found.get("accuracy")), *[""] * 5)
    table.caption = (
        f"global: {s['global_is']} on the common test set; clients: {s['client_is']}.\n"
        + (
            "local, common: its model on the common test set, with classes weighed as in its own rows, and as they are.\n"
            if local
            else ""
        )
        + f"Traffic {size(s['bytes_up'])} up, {size(s['bytes_down'])} down; {s['seconds']:.1f} s{_workers(s.get('workers', {}))}"
        + (f", training {_phases(s['fit_seconds'])}" if len(s.get("fit_seconds", {})) > 1 else "")
        + (f"; {s['failures']} failed calls (see rounds.jsonl)" if s["failures"] else "")
    )
    table.caption_justify = "left"
    return table
