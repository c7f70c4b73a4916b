"""What a node looks at before it reads its mail: letters from others are checked as a server checks replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from kilter.core import Method, Tree
from kilter.records import wire
from kilter.records.wire import Facts

Shape = tuple[Any, ...]
ABSURD = 1e4  # how many times as long as the others no training makes a model


def checked(box: Mapping[str, Tree], method: Method, written: str, me: str) -> tuple[dict[str, Tree], list[str]]:
    """The letters that are fit to read, written in this step, and a note on each of the others.

    All must be finite. What everyone spread to be pooled must look like mine (or, if I wrote none, like most) and not be absurdly
    large beside it, unless its step says that replies are not alike.
    """
    fine, notes = dict(box), []
    seen = {sender: wire.facts(letter) for sender, letter in box.items()}
    for sender, found in seen.items():
        if found.bad:
            notes.append(f"the letter of {sender} is not finite at {found.bad}")
            del fine[sender]
    if have_one_shape(method, written):
        for sender, why in odd_ones({sender: seen[sender] for sender in fine}, me).items():
            notes.append(why)
            del fine[sender]
    return fine, notes


def have_one_shape(method: Method, written: str) -> bool:
    """Whether the letters of this step are to be pooled and so must look alike."""
    kind, _, inner = written.rpartition(":")
    return kind == "spread" and bool(getattr(getattr(method, inner, None), "alike", True))


def odd_ones(looks: Mapping[str, Facts], me: str) -> dict[str, str]:
    """Whose letter looks otherwise than mine, or if I wrote none, than most; and how."""
    if not looks:
        return {}
    mine = looks.get(me)
    usual = mine.signature if mine else Counter(f.signature for f in looks.values()).most_common(1)[0][0]
    odd = {i: f"the letter of {i} has another shape than mine" for i, f in looks.items() if f.signature != usual}
    norms = {i: f.norm for i, f in looks.items() if i not in odd}
    return odd | {i: f"the letter of {i} is absurdly large" for i in absurd(norms, me)}


def absurd(norms: Mapping[str, float], me: str = "") -> list[str]:
    """Whose numbers are ABSURD times as large as mine, or if I gave none, as most; of fewer than three nobody can tell."""
    if me not in norms and len(norms) < 3:
        return []
    usual = norms[me] if me in norms else median(norms.values())
    return [i for i, n in norms.items() if n > ABSURD * max(usual, 1.0)]
