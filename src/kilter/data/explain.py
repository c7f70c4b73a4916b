"""What happens to the columns of a table, in plain words."""

from __future__ import annotations

from kilter.data.preparation import Preparation
from kilter.data.schema import MINIMUM, quoted


def only_other(preparation: Preparation) -> list[str]:
    """Categories in which every value counts as "other", so that the column says nothing."""
    return [f.column.name for f in preparation.columns if f.column.kind == "category" and not f.values]


def explain(preparation: Preparation, client_source: str) -> list[str]:
    """What happens to the columns of a table, in plain words, and how to change it."""
    by_kind: dict[str, list[str]] = {}
    for fitted in preparation.columns:
        by_kind.setdefault(fitted.column.kind, []).append(fitted.column.name)
    least = min((f.column.least for f in preparation.columns), default=MINIMUM)
    encoded = "embedded" if any(f.places for f in preparation.columns) else "one-hot"
    treatment = {
        "number": "standardised with the mean and deviation of all clients' training rows",
        "date": "days, standardised",
        "category": f"{encoded}; values in fewer than {least} training rows of every client are 'other'",
        "text": "tokens in order" if any(f.column.sequence for f in preparation.columns) else "word counts",
        "empty": "no values, always 0",
    }
    titles = {
        "number": "Numbers",
        "date": "Dates",
        "category": "Categories",
        "text": "Texts",
        "empty": "Empty columns",
    }
    what = f"task {preparation.task}" if preparation.task else f"classes {quoted(preparation.classes)}"
    lines = [f"Label: {preparation.target} ({what}). Change it with --label and --task."]
    if steps := preparation.schema.steps:
        series = dict.fromkeys(f.column.series for f in preparation.columns if f.column.series)
        lines.append(f"Time series: {', '.join(series)} ({steps} steps; other columns are the same at every step).")
    for kind, names in by_kind.items():
        lines.append(f"{titles[kind]}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''} ({treatment[kind]}).")
    if rare := only_other(preparation):
        lines.append(
            f"No value of {', '.join(rare[:8])} occurs in {least} training rows of a client: all count as 'other'."
        )
    lines.append("Change the preparation with --prepare, such as fill=median,clip=0.01; leave columns out with --drop.")
    if client_source:
        lines.append(f"Clients are named by {client_source}.")
    return lines
