"""How a method is examined, at every node and where there is a common test set. Never by training, tuning or weighing on it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.core import Method, Node, Rows, Tree
from kilter.metrics import confusion, local_accuracy, per_class, recalls

GLIMPSE = 2000  # rows of the common test set on which every node's own model is looked at between rounds
PART = 1000  # rows of it that a process looks at in one go
GO = 16 << 20  # bytes of several nodes' own rows that are looked at in one go


def is_personal(method: Method) -> bool:
    """Whether nodes have models of their own."""
    return type(method).personal is not Method.personal


@dataclass(frozen=True, eq=False)
class Look:
    """A request to measure a global model that was sent to all on one's rows, yielded by `examine`: nodes are answered together."""

    method: Method
    state: Tree
    rows: Rows


def looked(looks: Sequence[Look]) -> list[dict[str, float] | None]:
    """The answers. Who is looked at with whom depends on who asks and what rows they hold, never on the number of processes."""
    found: list[dict[str, float] | None] = []
    for some, x in _batches(looks):
        first = some[0]
        outputs = first.method.predict(first.state, x)
        y, sizes = torch.cat([look.rows["y"] for look in some]), [len(look.rows) for look in some]
        found += [None] * len(some) if outputs is None else first.method.task.measure_each(outputs, y, sizes)
    return found


def _batches(looks: Sequence[Look]) -> Iterator[tuple[list[Look], Tensor]]:
    """Neighbours that look at one state, with the rows of all: at most GO bytes of them, or a single one's."""
    some: list[Look] = []
    rows: list[Tensor] = []
    held = 0
    for look in looks:
        x = look.rows["x"]
        if some and (look.state is not some[0].state or held + x.nbytes > GO):
            yield some, _joined(rows)
            some, rows, held = [], [], 0
        some.append(look)
        rows.append(x)
        held += x.nbytes
    if some:
        yield some, _joined(rows)


def _joined(rows: list[Tensor]) -> Tensor:
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def examine(
    method: Method, node: Node, state: Tree, full: bool, alone: bool, seen: Mapping[str, Any] | None = None
) -> Generator[Look, Any, dict[str, Any]]:
    """What a node reports of the models it holds: metrics only.

    `test`, `valid`: the global model on my rows; `own_test`, `own_valid`: my own model on my rows; `own_bench`: my own model, or
    under peers (`alone`) the state I keep, on the common test set (between rounds on a fixed choice of GLIMPSE rows).
    `local`, `common`: accuracy on the common test set of the model I would use, its classes weighed by their shares among my
    training rows, and as it is. `seen` has what the global model does there, so that not everyone must look again.
    """
    task = method.task
    parts = {"test": node.data.test, "valid": node.data.valid}
    report: dict[str, Any] = {"n_test": len(node.data.test), "n_valid": len(node.data.valid)}

    def measured(outputs: Tensor | None, rows: Rows) -> dict[str, float] | None:
        return None if outputs is None else task.measure(outputs, rows["y"])

    for name, rows in parts.items():
        report[name] = None
        if len(rows) and alone:  # by itself: whether some nodes keep one object depends on how states travelled
            report[name] = measured(method.predict(state, rows["x"]), rows)
        elif len(rows):
            report[name] = yield Look(method, state, rows)
        if is_personal(method):
            report[f"own_{name}"] = measured(method.personal(node, state, rows["x"]), rows) if len(rows) else None
    if is_personal(method) or alone:
        common = glimpse(node.bench, full)
        outputs = None
        if common is not None and len(common):
            x = common["x"]
            outputs = method.personal(node, state, x) if is_personal(method) else method.predict(state, x)
        report["own_bench"] = None if common is None else measured(outputs, common)
        seen = None if common is None or outputs is None else by_class(method, outputs, common["y"])
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
