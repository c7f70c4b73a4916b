"""What a node looks at before it reads its mail: letters from others are checked as a server checks replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kilter import wire
from kilter.core import Method, Tree

Shape = tuple[Any, ...]


def checked(box: Mapping[str, Tree], method: Method, written: str, me: str) -> tuple[dict[str, Tree], list[str]]:
    """The letters that are fit to read, written in this step, and a note on each of the others.

    All must be finite. What everyone spread to be pooled must look like mine (or, if I wrote none, like most), unless its step
    says that replies are not alike.
    """
    fine, notes = dict(box), []
    for sender, letter in box.items():
        if bad := wire.not_finite(letter):
            notes.append(f"the letter of {sender} is not finite at {bad}")
            del fine[sender]
    if have_one_shape(method, written):
        for sender in odd_ones({sender: wire.signature(letter) for sender, letter in fine.items()}, me):
            notes.append(said_of(sender))
            del fine[sender]
    return fine, notes


def have_one_shape(method: Method, written: str) -> bool:
    """Whether the letters of this step are to be pooled and so must look alike."""
    kind, _, inner = written.rpartition(":")
    return kind == "spread" and bool(getattr(getattr(method, inner, None), "alike", True))


def odd_ones(shapes: Mapping[str, Shape], me: str) -> list[str]:
    """Whose letter looks otherwise than mine, or if I wrote none, than most."""
    if not shapes:
        return []
    usual = shapes.get(me) or Counter(shapes.values()).most_common(1)[0][0]
    return [sender for sender, shape in shapes.items() if shape != usual]


def said_of(sender: str) -> str:
    return f"the letter of {sender} has another shape than mine"
