"""What came of a step, as it travels from one process of a run to another: plain values and tensors, no code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kilter import trees
from kilter.core import Post, Tree
from kilter.errors import Mistake
from kilter.fast.memory_layout import apart
from kilter.records import wire
from kilter.runtimes.step_runner import Done

State = dict[str, Tree]
Outcome = tuple[Done, State | None]  # what a step came to at a node, and the node's state if it changed


def written(done: Mapping[str, Outcome]) -> dict[str, Any]:
    """Outcomes as a tree, column by column: replies are mostly alike, and then 25 take hardly longer than one."""
    found = [d for d, _ in done.values()]
    replies = [dict(d.reply) if isinstance(d.reply, Post) else d.reply for d in found]
    try:
        column = merged(replies)
    except _Unlike:
        column = {"v": replies}
    return {
        "nodes": list(done),
        "replies": column,
        "posts": [isinstance(d.reply, Post) for d in found],
        "errors": [_error(d) for d in found],
        "fits": [d.fits for d in found],
        "seconds": [d.seconds for d in found],
        "notes": [d.notes for d in found],
        "states": [state for _, state in done.values()],
        "seen": [d.seen and [d.seen.size, d.seen.norm, d.seen.bad] for d in found],
    }


def apologies(done: Mapping[str, Outcome]) -> dict[str, Any]:
    """The same where some outcomes cannot be sent: those are errors that say why."""
    found: dict[str, Outcome] = {}
    for node, outcome in done.items():
        try:
            wire.size(written({node: outcome}))
            found[node] = outcome
        except Exception as e:
            found[node] = Done(error=TypeError(f"what a step returned or kept cannot be sent: {e}")), None
    return written(found)


def failed(nodes: list[str], error: BaseException) -> dict[str, Any]:
    """Nothing came of it at any of these."""
    return written(dict.fromkeys(nodes, (Done(error=error), None)))


def _error(d: Done) -> list[Any] | None:
    if d.error is None:
        return None
    text = str(d.error) if isinstance(d.error, Mistake) else "".join(traceback.format_exception(d.error))
    return [isinstance(d.error, Mistake), text]


def read(answer: Mapping[str, Any]) -> Iterator[tuple[str, Done, State | None]]:
    """Outcomes, node by node."""
    replies = parted(answer["replies"])
    look = None  # replies that were merged have one signature
    for k, node in enumerate(answer["nodes"]):
        error: Exception | None = None
        if answer["errors"][k]:
            ours, text = answer["errors"][k]
            error = Mistake(text) if ours else RuntimeError(f"a step failed in a worker:\n{text}")
        reply = Post(replies[k]) if answer["posts"][k] else replies[k]
        seen = None
        if answer["seen"][k]:
            size, norm, bad = answer["seen"][k]
            look = look if look and "v" not in answer["replies"] else trees.signature(reply)
            seen = wire.Facts(size, look, norm, bad)
        fits = [(loss, steps) for loss, steps in answer["fits"][k]]
        done = Done(reply, error, fits, answer["seconds"][k], answer["notes"][k], seen)
        yield node, done, answer["states"][k]


class _Unlike(Exception):
    """Trees that cannot be one."""


def merged(trees: Sequence[Tree]) -> dict[str, Any]:
    """Trees that differ in their tensors' numbers and in plain values, as one: tensors (trees, ...), values in lists.

    >>> parted(merged([{"w": torch.ones(1), "n": 3}, {"w": torch.zeros(1), "n": 5}]))
    [{'w': tensor([1.]), 'n': 3}, {'w': tensor([0.]), 'n': 5}]
    """
    first = trees[0]
    kind = type(first)
    if any(type(t) is not kind for t in trees):
        raise _Unlike
    if isinstance(first, Tensor):
        if any(t.shape != first.shape or t.dtype != first.dtype for t in trees):
            raise _Unlike
        return {"t": _together(trees)}
    if kind is dict:
        names = list(first)
        if any(list(t) != names for t in trees):
            raise _Unlike
        return {"d": {k: merged([t[k] for t in trees]) for k in names}} if names else {"v": list(trees)}
    if kind in (list, tuple):
        if any(len(t) != len(first) for t in trees):
            raise _Unlike
        columns = [merged([t[i] for t in trees]) for i in range(len(first))]
        return {"l" if kind is list else "u": columns} if columns else {"v": list(trees)}
    if isinstance(first, Mapping):
        raise _Unlike
    return {"v": list(trees)}


def _together(parts: Sequence[Tensor]) -> Tensor:
    """A stack of these; where they lie, if that is side by side."""
    first = parts[0]
    whole, start, size = first._base, first.data_ptr(), first.nbytes
    beside = (p._base is whole and p.data_ptr() == start + k * size and p.is_contiguous() for k, p in enumerate(parts))
    if whole is not None and size and all(beside):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(parts))


def parted(column: Mapping[str, Any]) -> list[Tree]:
    """What was merged."""
    ((kind, held),) = column.items()
    if kind == "v":
        return list(held)
    if kind == "t":
        return list(apart(held))
    if kind == "d":
        parts = [parted(v) for v in held.values()]
        return [dict(zip(held, values, strict=True)) for values in zip(*parts, strict=True)]
    values = zip(*[parted(v) for v in held], strict=True)
    return [list(v) if kind == "l" else v for v in values]
