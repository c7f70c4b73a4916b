"""Checks of what sites send in bodies and the framework itself reads: results of steps, notes, evaluation reports, row counts."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kilter.core import Method, Note, Tree
from kilter.net.fields import Fields, finite
from kilter.records import wire
from kilter.records.wire import Malformed
from kilter.runtimes.step_names import StepKind, StepName

NOTE_TEXT, NOTE_FIELDS, NOTES = 500, 2_000, 50  # longest sentence; most entries of a table; most notes of a reply


@dataclass(frozen=True)
class StepResult:
    """What a step came to at a site."""

    reply: Tree
    fits: list[tuple[float, int]]  # (mean loss, steps) of each fit
    seconds: float
    notes: list[Note]

    def tree(self) -> Tree:
        fits = [[loss, steps] for loss, steps in self.fits]
        return {"reply": self.reply, "fits": fits, "seconds": self.seconds, "notes": self.notes}

    @staticmethod
    def parse(tree: Tree, ids: Sequence[str] = ()) -> StepResult:
        """From a decoded body; `ids` are the nodes that a note may mention."""
        if not isinstance(tree, dict) or set(tree) != {"reply", "fits", "seconds", "notes"}:
            raise Malformed("its result is not a result")
        seconds = finite(tree["seconds"])
        fits, notes = tree["fits"], tree["notes"]
        if seconds is None or not 0 <= seconds < 1e9 or not isinstance(fits, list) or len(fits) > 10_000:
            raise Malformed("its result has impossible times")
        if not isinstance(notes, list) or len(notes) > NOTES:
            raise Malformed(f"it has more than {NOTES} notes")
        return StepResult(tree["reply"], [_fit(f) for f in fits], seconds, [check_note(n, ids) for n in notes])


def _fit(value: object) -> tuple[float, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Malformed("its result has a fit that is none")
    loss, steps = finite(value[0]), value[1]
    if loss is None or isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**40:
        raise Malformed("its result has a fit with impossible numbers")
    return loss, steps


def check_note(note: object, ids: Sequence[str]) -> Note:
    """A sentence, or a table of plain values; what other code reads (`listens`) must have its shape."""
    if isinstance(note, str):
        if len(note) > NOTE_TEXT or not note.isprintable():
            raise Malformed(f"it has a note that is not a line of at most {NOTE_TEXT} characters")
        return note
    if not isinstance(note, dict) or len(note) > NOTE_FIELDS:
        raise Malformed("it has a note that is neither a line nor a small table")
    table: dict[str, object] = {}
    for key, value in note.items():
        _check_key(key)
        if isinstance(value, dict):
            if len(value) > NOTE_FIELDS:
                raise Malformed("it has a note that is too long")
            table[key] = {_check_key(k): _number_or_text(v) for k, v in value.items()}
        else:
            table[key] = _number_or_text(value)
    for key in ("uncertainty", "chosen"):
        if key in table and finite(table[key]) is None:
            raise Malformed(f"it has a note whose {key} is not a number")
    if "listens" in table:
        weights = table["listens"]
        if not isinstance(weights, dict) or not all(
            (not ids or k in ids) and (finite(v) or 0.0) >= 0 and finite(v) is not None for k, v in weights.items()
        ):
            raise Malformed("it has a note that listens to nobody we know")
    return table


def _check_key(key: object) -> str:
    if not isinstance(key, str) or len(key) > 100 or not key.isprintable():
        raise Malformed("it has a note with an impossible field")
    return key


def _number_or_text(value: object) -> object:
    if value is None or isinstance(value, bool) or finite(value) is not None:
        return value
    if isinstance(value, str) and len(value) <= NOTE_TEXT and value.isprintable():
        return value
    raise Malformed("it has a note with an impossible value")


MOST_METRICS = 10_000  # with --metrics by_class there are four for each class
METRICS = ("test", "valid", "own_test", "own_valid", "own_bench")  # parts of an evaluation report that hold metrics
SHARES = ("local", "common")  # parts that hold one accuracy


def check_report(report: Tree, rows: int, names: Collection[str] | None) -> Tree:
    """A site's evaluation report: known parts, the task's metrics, finite numbers, no more rows than it announced.

    A metric may be None: it is not defined on the site's rows, such as AUROC with a single class.
    """
    if not isinstance(report, dict) or not set(report) <= {"n_test", "n_valid", *METRICS, *SHARES}:
        raise Malformed("its evaluation is not a report")
    for key in ("n_test", "n_valid"):
        Fields(report, "evaluation").integer(key, 0, rows)
    for part in METRICS:
        metrics = report.get(part)
        if metrics is None:
            continue
        if not isinstance(metrics, dict) or not metrics or len(metrics) > MOST_METRICS:
            raise Malformed(f"its evaluation has no metrics in {part}")
        if names is not None and set(metrics) != set(names):
            raise Malformed(f"its evaluation has other metrics than the task in {part}")
        if any(not isinstance(k, str) or (v is not None and finite(v) is None) for k, v in metrics.items()):
            raise Malformed(f"its evaluation has an impossible number in {part}")
    for part in SHARES:
        value = report.get(part)
        if value is not None and not 0 <= (finite(value) if finite(value) is not None else -1.0) <= 1:  # type: ignore[operator]
            raise Malformed(f"its evaluation has an impossible {part}")
    for part in ("test", "valid"):
        report.setdefault(part, None)
    return report


def check_counts(reply: Tree, most: int) -> None:
    """Whole numbers in a reply count rows or classes: none is negative, and none is larger than the site can have."""
    if isinstance(reply, bool):
        return
    if isinstance(reply, int):
        if not 0 <= reply <= most:
            shown = f"{reply}" if abs(reply) < 10**20 else "a number of more than 20 digits"
            raise Malformed(f"it counts {shown} rows, and {most} are possible")
    elif isinstance(reply, Mapping):
        for value in reply.values():
            check_counts(value, most)
    elif isinstance(reply, list | tuple):
        for value in reply:
            check_counts(value, most)


def read_again(body: mmap.mmap) -> Tree:
    """A checked reply, from its file."""
    tree: Tree = wire.decode(body)["reply"]
    body.madvise(mmap.MADV_DONTNEED)
    return tree


def writes_letters(step: object) -> bool | None:
    """Whether a step returns letters, by its annotation; None if it has none."""
    annotation = inspect.signature(step).return_annotation if callable(step) else inspect.Signature.empty
    return None if annotation is inspect.Signature.empty else "Post" in str(annotation)


def check_spread(message: Tree, method: Method, step: StepName) -> None:
    """What the first part of a pool is told: which of the method's views to use, and between peers who takes part."""
    expected = {"to", "view"} if step.kind is StepKind.SPREAD else {"view"}
    if not isinstance(message, dict) or set(message) != expected or not isinstance(message.get("to", []), list):
        raise Malformed("an order to train and spread has another message than expected")
    view = message["view"]
    if view is not None and (not isinstance(view, str) or view.startswith("_") or not hasattr(method, view)):
        raise Malformed("a view that is not the method's")
