"""What came of a step, as it travels from one process of a run to another: plain values and tensors, no code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from kilter import wire
from kilter.core import Post, Tree
from kilter.errors import Mistake
from kilter.runtimes.host import Done

State = dict[str, Tree]
Outcome = tuple[Done, State | None]  # what a step came to at a node, and the node's state if it changed


def written(done: Mapping[str, Outcome]) -> dict[str, Any]:
    """Outcomes as a tree."""
    return {node: _written(*outcome) for node, outcome in done.items()}


def apologies(done: Mapping[str, Outcome]) -> dict[str, Any]:
    """The same where some outcomes cannot be sent: those are errors that say why."""
    found = {}
    for node, outcome in done.items():
        try:
            found[node] = _written(*outcome)
            wire.size(found[node])
        except Exception as e:
            found[node] = _written(Done(error=TypeError(f"what a step returned or kept cannot be sent: {e}")), None)
    return found


def failed(nodes: list[str], error: BaseException) -> dict[str, Any]:
    """Nothing came of it at any of these."""
    return written(dict.fromkeys(nodes, (Done(error=error), None)))


def _written(d: Done, state: State | None) -> dict[str, Any]:
    error = None
    if d.error is not None:
        text = str(d.error) if isinstance(d.error, Mistake) else "".join(traceback.format_exception(d.error))
        error = [isinstance(d.error, Mistake), text]
    return {
        "reply": dict(d.reply) if isinstance(d.reply, Post) else d.reply,
        "post": isinstance(d.reply, Post),
        "error": error,
        "fits": d.fits,
        "seconds": d.seconds,
        "notes": d.notes,
        "state": state,
    }


def read(answer: Mapping[str, Any]) -> Iterator[tuple[str, Done, State | None]]:
    """Outcomes, node by node."""
    for node, a in answer.items():
        error: Exception | None = None
        if a["error"]:
            ours, text = a["error"]
            error = Mistake(text) if ours else RuntimeError(f"a step failed in a worker:\n{text}")
        reply = Post(a["reply"]) if a["post"] else a["reply"]
        fits = [(loss, steps) for loss, steps in a["fits"]]
        yield node, Done(reply, error, fits, a["seconds"], a["notes"]), a["state"]
