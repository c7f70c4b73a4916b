"""The table of `kilter runs`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kilter.records.display import duration, metric, size
from kilter.report.run_list import ListedRun


def run_table(entries: Sequence[ListedRun]) -> Table:
    """One line for each run or study."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("folder", "method", "state", "round", "left", "global", "clients", "failed", "traffic"):
        left = heading in ("folder", "method", "state")
        table.add_column(
            heading, justify="left" if left else "right", overflow="fold" if heading == "folder" else "ellipsis"
        )
    for e in entries:
        named = "" if e.metric == "accuracy" else f" {e.metric}"
        table.add_row(
            e.folder,
            e.method,
            e.state,
            f"{e.round} runs" if e.kind == "study" else f"{e.round}/{e.rounds or '?'}",
            duration(e.seconds_left) if e.seconds_left is not None else "",
            *(f"{metric(e.metric, s)}{named}" if s is not None else "" for s in (e.score, e.client_score)),
            str(e.failures or ""),
            size(e.bytes) if e.bytes else "",
        )
    return table
