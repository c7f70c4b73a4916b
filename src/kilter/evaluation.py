"""How a method is examined, at every node and where there is a common test set. Never by training, tuning or weighing on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.core import Method, Node, Rows, Tree
from kilter.metrics import confusion, local_accuracy, per_class, recalls

GLIMPSE = 2000  # rows of the common test set on which every node's own model is looked at between rounds
PART = 1000  # rows of it that a process looks at in one go


def is_personal(method: Method) -> bool:
    """Whether nodes have models of their own."""
    return type(method).personal is not Method.personal


def examine(
    method: Method, node: Node, state: Tree, full: bool, alone: bool, seen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a node reports of the models it holds: metrics only.

    `test`, `valid`: the global model on my rows; `own_test`, `own_valid`: my own model on my rows; `own_bench`: my own model, or
    under peers (`alone`) the state I keep, on the common test set (between rounds on a fixed choice of GLIMPSE rows).
    `local`, `common`: accuracy on the common test set of the model I would use, its classes weighed by their shares among my
    training rows, and as it is. `seen` has what the global model does there, so that not everyone must look again.
    """
    task = method.task

    def outputs_on(rows: Rows | None, own: bool) -> Tensor | None:
        if rows is None or not len(rows):
            return None
        return method.personal(node, state, rows["x"]) if own else method.predict(state, rows["x"])

    def look(rows: Rows, own: bool) -> dict[str, float] | None:
        outputs = outputs_on(rows, own)
        return None if outputs is None else task.measure(outputs, rows["y"])

    report: dict[str, Any] = {"n_test": len(node.data.test), "n_valid": len(node.data.valid)}
    report["test"], report["valid"] = look(node.data.test, False), look(node.data.valid, False)
    if is_personal(method):
        report["own_test"], report["own_valid"] = look(node.data.test, True), look(node.data.valid, True)
    if is_personal(method) or alone:
        rows = glimpse(node.bench, full)
        outputs = outputs_on(rows, is_personal(method))
        report["own_bench"] = None if rows is None or outputs is None else task.measure(outputs, rows["y"])
        seen = None if rows is None or outputs is None else by_class(method, outputs, rows["y"])
    if seen and len(node.data.train):
        counts = torch.bincount(node.data.train["y"], minlength=len(seen["recalls"])).tolist()
        report |= {"local": local_accuracy(seen["recalls"], counts), "common": seen["accuracy"]}
    return report


def by_class(method: Method, outputs: Tensor, y: Tensor) -> dict[str, Any] | None:
    """A classifier's accuracy on these rows, and on those of each class; None of other tasks."""
    if method.task.metrics is not None:
        return None
    counts = confusion(outputs, y)
    return {"accuracy": float(counts.diagonal().sum().double() / counts.sum()), "recalls": recalls(counts)}


def parts(rows: Rows) -> int:
    """In how many parts the common test set is looked at: the same ones whoever does it, and so are the numbers."""
    return max(1, -(-len(rows) // PART))


def predict_part(method: Method, state: Tree, rows: Rows, part: int) -> Tensor | None:
    """What the global model says of this part of the common test set."""
    chosen = rows.take(torch.arange(part * PART, min((part + 1) * PART, len(rows))))
    return method.predict(state, chosen["x"])


def examine_bench(
    method: Method, outputs: Tensor | None, y: Tensor, full: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The global model on the common test set, every class by itself when asked in full; and what nodes are told of it."""
    return (None, None) if outputs is None else (judge(method, outputs, y, full), by_class(method, outputs, y))


def examine_variants(method: Method, state: Tree, rows: Rows, full: bool) -> dict[str, dict[str, Any]]:
    """The method's other results on the common test set (between rounds on a fixed choice of GLIMPSE rows)."""
    found = method.variants(state)
    seen = (glimpse(rows, full) or rows).batch() if found else {}
    return {name: judge(method, outputs(seen["x"]), seen["y"], full) for name, outputs in found.items()}


def judge(method: Method, outputs: Tensor, y: Tensor, full: bool) -> dict[str, Any]:
    """The task's metrics; of a classifier also every class by itself when asked in full."""
    found: dict[str, Any] = method.task.measure(outputs, y)
    if full and method.task.metrics is None:
        counts = confusion(outputs, y)
        found |= {"per_class": per_class(counts), "confusion": counts.tolist()}
    return found


def glimpse(rows: Rows | None, full: bool) -> Rows | None:
    """All rows, or a fixed choice of GLIMPSE of them."""
    if rows is None or full or len(rows) <= GLIMPSE:
        return rows
    return rows.take(torch.linspace(0, len(rows) - 1, GLIMPSE).long())


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Over clients: mean, std, min, max and the mean of the worst tenth (at least one client).

    >>> spread([0.5, 0.7, 0.9])["worst_decile"]
    0.5
    """
    if not values:
        return None
    v = np.sort(np.asarray(values, dtype=float))
    worst = v[: max(1, len(v) // 10)]
    return {
        "mean": float(v.mean()),
        "std": float(v.std()),
        "min": float(v[0]),
        "max": float(v[-1]),
        "worst_decile": float(worst.mean()),
    }


def mean_of(reports: Sequence[Mapping[str, Any]], part: str) -> dict[str, float] | None:
    """The plain mean over nodes of every metric of one part."""
    found: list[dict[str, float]] = [r[part] for r in reports if r.get(part)]
    return {name: float(np.mean([f[name] for f in found])) for name in found[0]} if found else None
