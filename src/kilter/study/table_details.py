"""Tables of details: a method's other results (its variants), and the metrics of each class."""

from __future__ import annotations

from collections.abc import Sequence

from kilter.errors import Mistake
from kilter.records.display import accuracy
from kilter.study.results import CellResult, Results
from kilter.study.statistics import mean_std

VARIANT = {"accuracy": "accuracy", "f1": "F1", "calibration_error": "calibration error", "entropy": "entropy"}
CLASS = {"precision": "precision", "recall": "sensitivity", "specificity": "specificity", "f1": "F1"}


def variants(cell: CellResult) -> tuple[list[str], list[list[str]]] | None:
    """Headings and rows: every method's other results on the common test set, in per cent; None if there are none."""
    rows = []
    for line in cell.lines:
        for name in dict.fromkeys(name for r in line.runs for name in r.variants):
            metrics = [r.variants[name] for r in line.runs if name in r.variants]
            rows.append([f"{line.label}: {name}", *(_over([m[k] for m in metrics if k in m]) for k in VARIANT)])
    return (["method: result", *VARIANT.values()], rows) if rows else None


def by_class(results: Results, cell: CellResult) -> tuple[list[str], list[list[str]]] | None:
    """Headings and rows: the global model's metrics of each class against the rest, in per cent."""
    names = class_names(results, cell)
    rows = []
    for line in cell.lines:
        metrics = [r.classes for r in line.runs if r.classes]
        for at in range(len(metrics[0]["f1"]) if metrics else 0):
            name = names[at] if at < len(names) else f"class {at}"
            rows.append([f"{line.label}: {name}", *(_over([m[k][at] for m in metrics]) for k in CLASS)])
    return (["method: class", *CLASS.values()], rows) if rows else None


def classes_by_client(cell: CellResult) -> tuple[list[str], list[list[str]]] | None:
    """Headings and rows: each client's model on its own test rows of each class, in per cent (`--metrics by_class`)."""
    rows = []
    for line in cell.lines:
        runs = [r.classes_by_client for r in line.runs if r.classes_by_client]
        for client in sorted({name for run in runs for name in run}):
            metrics = [run[client] for run in runs if client in run]
            for name in dict.fromkeys(k.partition(":")[2] for m in metrics for k in m):
                values = ([m[key] for m in metrics if (key := f"{k}:{name}") in m] for k in CLASS)
                rows.append([f"{line.label}: {client}, {name}", *map(_over, values)])
    return (["method: client, class", *CLASS.values()], rows) if rows else None


def class_names(results: Results, cell: CellResult) -> Sequence[str]:
    """The names of the data set's classes; none if it cannot be loaded."""
    study = results.study
    try:
        return study.experiment(cell.cell, study.entries[0], study.seeds[0]).dataset().classes
    except Mistake:
        return ()


def _over(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, in per cent."""
    return accuracy(mean_std(values) if values else None)
