"""What a run knows of the targets of each client: for the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kilter.core import Data
from kilter.records.types import Partition
from kilter.tasks import Task


def partition_record(
    task: Task, counts: dict[str, list[int]], clients: Mapping[str, Data], ids: Sequence[str]
) -> Partition | None:
    """Classes counted at each client, or statistics of other targets where all clients' rows are at hand."""
    given = task.facts.get("names")
    names = [str(name) for name in given] if isinstance(given, tuple | list) else []
    if counts:
        return Partition(counts, names)
    return Partition({}, targets=target_statistics(task.kind, names, clients)) if set(clients) == set(ids) else None


def target_statistics(task: str, names: Sequence[str], clients: Mapping[str, Data]) -> dict[str, dict[str, float]]:
    """By client: its training rows, and statistics of their targets by name. `names` are those of several labels."""
    return {
        client: {"rows": len(data.train), **_statistics(task, names, data.train["y"])}
        for client, data in clients.items()
        if "y" in data.train.tables
    }


def _statistics(task: str, names: Sequence[str], y: Tensor) -> dict[str, float]:
    if len(y) and task == "regression":
        y = y.double()
        return {
            "mean": float(y.mean()),
            "deviation": float(y.std(correction=0)),
            "smallest": float(y.min()),
            "largest": float(y.max()),
        }
    if len(y) and task == "survival":
        return {"median time": float(y[:, 0].median()), "events": float(y[:, 1].sum())}
    if task == "multi-label":
        return {name: float(count) for name, count in zip(names, y.sum(0), strict=True)}
    return {}
