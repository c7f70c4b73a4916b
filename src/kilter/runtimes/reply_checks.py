"""Checks on letters before a node reads them: the same that a server applies to replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from kilter.core import Method, Tree
from kilter.records import wire
from kilter.records.wire import Facts
from kilter.runtimes.step_names import StepKind, StepName

Shape = tuple[object, ...]
OVERSIZED = 1e4  # a norm this many times the usual one cannot come from training


def checked(box: Mapping[str, Tree], method: Method, written: StepName, me: str) -> tuple[dict[str, Tree], list[str]]:
    """The letters of this step that pass, and a note on each of the others.

    All must be finite. Letters to be pooled must have the shape of my own letter (without one, the most common shape) and a
    comparable norm, unless their step says that replies differ in shape.
    """
    fine, notes = dict(box), []
    seen = {sender: wire.facts(letter) for sender, letter in box.items()}
    for sender, facts in seen.items():
        if facts.bad:
            notes.append(f"the letter of {sender} is not finite at {facts.bad}")
            del fine[sender]
    if must_match(method, written):
        for sender, why in mismatched({sender: seen[sender] for sender in fine}, me).items():
            notes.append(why)
            del fine[sender]
    return fine, notes


def must_match(method: Method, written: StepName) -> bool:
    """Whether the letters of this step are pooled and so must have one shape."""
    if written.kind is StepKind.MERGE:
        return True
    pooled = written.kind in (StepKind.SPREAD, StepKind.SUBMIT)
    return pooled and bool(getattr(getattr(method, written.step, None), "alike", True))


def mismatched(looks: Mapping[str, Facts], me: str) -> dict[str, str]:
    """Senders whose letter differs from mine (without one, from most), and how."""
    if not looks:
        return {}
    mine = looks.get(me)
    usual = mine.signature if mine else Counter(f.signature for f in looks.values()).most_common(1)[0][0]
    odd = {i: f"the letter of {i} differs in shape from mine" for i, f in looks.items() if f.signature != usual}
    norms = {i: f.norm for i, f in looks.items() if i not in odd}
    return odd | {i: f"the letter of {i} is far too large" for i in oversized(norms, me)}


def oversized(norms: Mapping[str, float], me: str = "") -> list[str]:
    """Senders whose norm is OVERSIZED times mine (without one, times the median). With fewer than three, nobody."""
    if me not in norms and len(norms) < 3:
        return []
    usual = norms[me] if me in norms else median(norms.values())
    return [i for i, n in norms.items() if n > OVERSIZED * max(usual, 1.0)]
