"""A finished run in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kilter.records.display import counted, metric, size
from kilter.records.notices import describe
from kilter.records.run_folder import read_rounds, read_summary
from kilter.records.types import ClientModel, Evaluation, GlobalModel, Spread, Summary
from kilter.report.sparkline import curve_lines

GLOBAL_WORDS: dict[GlobalModel, str] = {
    "global": "the global model",
    "mean of personal models": "the mean over the clients' own models",
}
CLIENT_WORDS: dict[ClientModel, str] = {
    "personal": "each client's own model, on its own test rows",
    "received": "the model that each client received, on its own test rows",
}


def show_result(folder: Path, console: Console) -> None:
    """Print the result of a run, what did not happen in it, and where its files are."""
    from kilter.report.trust import draw

    summary = read_summary(folder)
    for line in curve_lines(read_rounds(folder), summary.chosen_by):
        console.print(line, markup=False, soft_wrap=True)
    console.print(result_table(folder))
    show_notices(summary, console)
    if paths := draw(folder):
        console.print(f"Who listens to whom: {', '.join(map(str, paths))}", soft_wrap=True)
    console.print(f"Files: {folder}")


def show_briefly(folder: Path, console: Console) -> None:
    """Print one line about a run, and what did not happen in it: `--quiet`."""
    s = read_summary(folder)
    main = s.chosen_by
    client, scores = s.last.client.get(main), s.last.scores
    shown = [f"global {metric(main, scores.metrics.get(main))}"] if scores else []
    shown += [f"clients {metric(main, client.mean)}"] if client else []
    traffic = f"{size(s.bytes_up + s.bytes_down)}, {s.seconds:.1f} s"
    console.print(f"{s.method}: {main} {', '.join(shown) or '-'}; {traffic}; {folder}", markup=False, soft_wrap=True)
    show_notices(s, console)


def show_notices(summary: Summary, console: Console) -> None:
    """Print what did not happen as intended."""
    if summary.notices:
        console.print("Not as intended (details: rounds.jsonl):", style="bold")
        for notice in summary.notices:
            console.print(f"  {describe(notice)}", markup=False, soft_wrap=True)


def _workers(shared: Mapping[str, int]) -> str:
    """How many processes trained."""
    counts = sorted(set(shared.values()))
    return f" on {counts[-1]} worker{'s' * (counts[-1] > 1)}" if counts else ""


def _phases(seconds: Mapping[str, float]) -> str:
    """The seconds of each phase of training.

    >>> _phases({"paint": 1.25, "train": 3.0})
    'paint 1.2 s, train 3.0 s'
    """
    return ", ".join(f"{step} {s:.1f} s" for step, s in seconds.items())


def _spread(over: Spread | None, name: str = "accuracy") -> list[str]:
    if over is None:
        return ["-"] * 5
    return [metric(name, v) for v in (over.mean, over.std, over.min, over.max, over.worst_decile)]


def result_table(folder: Path) -> Table:
    """The last and the best round of a finished run."""
    summary = read_summary(folder)
    table = Table(
        title=f"{summary.method}, {counted(summary.rounds, 'round')}, seed {summary.seed}",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for heading in ("", "round", "global", "clients: mean", "std", "min", "max", "worst tenth"):
        table.add_column(heading, justify="left" if not heading else "right")
    _add_rows(table, "last round", summary.last, summary.chosen_by)
    if summary.best:
        _add_rows(table, "best on validation", summary.best, summary.chosen_by)
    table.caption = _caption(summary)
    table.caption_justify = "left"
    return table


def _add_rows(table: Table, name: str, evaluation: Evaluation, main: str) -> None:
    overall = evaluation.scores.metrics.get(main) if evaluation.scores else None
    table.add_row(name, str(evaluation.round), metric(main, overall), *_spread(evaluation.client.get(main), main))
    for part, over in evaluation.bench.items():
        if _is_shown(part, over):
            table.add_row(f"  {part}", "", "", *_spread(over))
    for variant, scores in evaluation.variants.items():
        table.add_row(f"  {variant}", "", metric(main, scores.metrics.get(main)), *[""] * 5)


def _is_shown(part: str, over: Spread) -> bool:
    """With one model for all, `common` is the same at every client."""
    return part == "local" or over.min < over.max


def _caption(summary: Summary) -> str:
    better = f" ({summary.directions[summary.chosen_by]} is better)" if summary.chosen_by in summary.directions else ""
    named = [] if summary.chosen_by == "accuracy" else [f"All numbers are the metric {summary.chosen_by}{better}."]
    lines = [
        *named,
        f"global: {GLOBAL_WORDS[summary.global_model]} on the common test set; clients: {CLIENT_WORDS[summary.client_model]}.",
    ]
    shown = {part for e in (summary.last, summary.best) if e for part, over in e.bench.items() if _is_shown(part, over)}
    if "local" in shown:
        lines.append("local: a client's model on the common test set, with classes weighted as in the client's rows.")
    if "common" in shown:
        lines.append("common: a client's model on the common test set, unweighted.")
    traffic = f"Traffic {size(summary.bytes_up)} up, {size(summary.bytes_down)} down; {summary.seconds:.1f} s"
    phases = f", training {_phases(summary.fit_seconds)}" if len(summary.fit_seconds) > 1 else ""
    failed = f"; {summary.failures} failed calls (see rounds.jsonl)" if summary.failures else ""
    return "\n".join([*lines, f"{traffic}{_workers(summary.workers)}{phases}{failed}"])
