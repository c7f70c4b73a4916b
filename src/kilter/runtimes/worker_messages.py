"""The results of a step, as worker processes send them: plain values and tensors, no code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import msgspec
import torch
from torch import Tensor

from kilter import trees
from kilter.core import Note, Post, Tree
from kilter.errors import Mistake
from kilter.fast.memory_layout import unstack
from kilter.records import wire
from kilter.records.types import Exhibit
from kilter.runtimes.step_runner import Done, WorkerError, reason

State = dict[str, Tree]
Outcome = tuple[Done, State | None]  # the result of a step at a node, and the node's state if it changed


def encode_outcomes(done: Mapping[str, Outcome]) -> dict[str, Tree]:
    """Outcomes as a tree, column by column. Replies mostly have one structure; 25 then take hardly longer than one."""
    results = [d for d, _ in done.values()]
    replies = [dict(d.reply) if isinstance(d.reply, Post) else d.reply for d in results]
    try:
        column = merge_columns(replies)
    except _Mismatch:
        column = {"v": replies}
    return {
        "nodes": list(done),
        "replies": column,
        "posts": [isinstance(d.reply, Post) for d in results],
        "errors": [_error(d) for d in results],
        "fits": [d.fits for d in results],
        "seconds": [d.seconds for d in results],
        "notes": [[_encode_note(note) for note in d.notes] for d in results],
        "states": [state for _, state in done.values()],
        "seen": [d.seen and [d.seen.size, d.seen.norm, d.seen.bad] for d in results],
    }


def encode_sendable(done: Mapping[str, Outcome]) -> dict[str, Tree]:
    """Like `encode_outcomes`, with an error in place of every outcome that cannot be sent."""
    sendable: dict[str, Outcome] = {}
    for node, outcome in done.items():
        try:
            wire.size(encode_outcomes({node: outcome}))
            sendable[node] = outcome
        except Exception as e:
            sendable[node] = Done(error=TypeError(f"what a step returned or kept cannot be sent: {e}")), None
    return encode_outcomes(sendable)


def encode_failure(nodes: list[str], error: BaseException) -> dict[str, Tree]:
    """The same error for all of these nodes."""
    return encode_outcomes(dict.fromkeys(nodes, (Done(error=error), None)))


def _error(d: Done) -> list[bool | str] | None:
    if d.error is None:
        return None
    text = "" if isinstance(d.error, Mistake) else "".join(traceback.format_exception(d.error))
    return [isinstance(d.error, Mistake), reason(d.error), text]


def decode_outcomes(answer: Mapping[str, Tree]) -> Iterator[tuple[str, Done, State | None]]:
    """Outcomes, node by node."""
    replies = split_columns(answer["replies"])
    signature = None  # merged replies share one
    for k, node in enumerate(answer["nodes"]):
        error: Exception | None = None
        if answer["errors"][k]:
            is_mistake, line, text = answer["errors"][k]
            error = Mistake(line) if is_mistake else WorkerError(line, text)
        reply = Post(replies[k]) if answer["posts"][k] else replies[k]
        seen = None
        if answer["seen"][k]:
            size, norm, bad = answer["seen"][k]
            signature = signature if signature and "v" not in answer["replies"] else trees.signature(reply)
            seen = wire.Facts(size, signature, norm, bad)
        fits = [(loss, steps) for loss, steps in answer["fits"][k]]
        notes = [_decode_note(note) for note in answer["notes"][k]]
        done = Done(reply, error, fits, answer["seconds"][k], notes, seen)
        yield node, done, answer["states"][k]


def _encode_note(note: Note) -> Note:
    """A note as plain values; exhibits are records."""
    exhibit = note.get("exhibit") if isinstance(note, dict) else None
    return {"exhibit": asdict(exhibit)} if isinstance(exhibit, Exhibit) else note


def _decode_note(note: Note) -> Note:
    return (
        {"exhibit": msgspec.convert(note["exhibit"], Exhibit)} if isinstance(note, dict) and "exhibit" in note else note
    )


class _Mismatch(Exception):
    """Trees of different structure."""


def merge_columns(trees: Sequence[Tree]) -> dict[str, Tree]:
    """Merge trees of one structure: tensors become (trees, ...), plain values become lists.

    >>> split_columns(merge_columns([{"w": torch.ones(1), "n": 3}, {"w": torch.zeros(1), "n": 5}]))
    [{'w': tensor([1.]), 'n': 3}, {'w': tensor([0.]), 'n': 5}]
    """
    first = trees[0]
    kind = type(first)
    if any(type(t) is not kind for t in trees):
        raise _Mismatch
    if isinstance(first, Tensor):
        if any(t.shape != first.shape or t.dtype != first.dtype for t in trees):
            raise _Mismatch
        return {"t": _together(trees)}
    if kind is dict:
        names = list(first)
        if any(list(t) != names for t in trees):
            raise _Mismatch
        return {"d": {k: merge_columns([t[k] for t in trees]) for k in names}} if names else {"v": list(trees)}
    if kind in (list, tuple):
        if any(len(t) != len(first) for t in trees):
            raise _Mismatch
        columns = [merge_columns([t[i] for t in trees]) for i in range(len(first))]
        return {"l" if kind is list else "u": columns} if columns else {"v": list(trees)}
    if isinstance(first, Mapping):
        raise _Mismatch
    return {"v": list(trees)}


def _together(parts: Sequence[Tensor]) -> Tensor:
    """A stack of these tensors; without a copy if they lie side by side in memory."""
    first = parts[0]
    base, start, size = first._base, first.data_ptr(), first.nbytes
    adjacent = (p._base is base and p.data_ptr() == start + k * size and p.is_contiguous() for k, p in enumerate(parts))
    if base is not None and size and all(adjacent):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(parts))


def split_columns(column: Mapping[str, Tree]) -> list[Tree]:
    """Undo `merge_columns`."""
    ((kind, held),) = column.items()
    if kind == "v":
        return list(held)
    if kind == "t":
        return list(unstack(held))
    if kind == "d":
        parts = [split_columns(v) for v in held.values()]
        return [dict(zip(held, values, strict=True)) for values in zip(*parts, strict=True)]
    values = zip(*[split_columns(v) for v in held], strict=True)
    return [list(v) if kind == "l" else v for v in values]
