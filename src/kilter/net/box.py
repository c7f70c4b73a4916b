"""What a node looks at before it reads its mail: letters from others are checked as a server checks replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kilter import wire
from kilter.core import Method, Tree


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
    kind, _, inner = written.rpartition(":")
    if kind == "spread" and getattr(getattr(method, inner, None), "alike", True) and fine:
        shapes = {sender: wire.signature(letter) for sender, letter in fine.items()}
        usual = shapes.get(me) or Counter(shapes.values()).most_common(1)[0][0]
        for sender, shape in shapes.items():
            if shape != usual:
                notes.append(f"the letter of {sender} has another shape than mine")
                del fine[sender]
    return fine, notes
