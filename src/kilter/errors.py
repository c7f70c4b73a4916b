"""User mistakes: one sentence that says what is wrong and what to do. The command line prints it and exits with code 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Mistake(Exception):
    """Invalid input: a setting, data, a message or a file. Never raised for a bug in Kilter."""


class Malformed(Mistake):
    """Bytes or values from elsewhere that are not what they should be: a letter, a message, a file."""


def unknown(what: str, name: str, known: Iterable[str]) -> Mistake:
    """A Mistake for an unknown name. It suggests the closest known name.

    >>> print(unknown("method", "fedporx", ["fedavg", "fedprox"]))
    Unknown method 'fedporx': did you mean 'fedprox'? There are: fedavg, fedprox.
    """
    known = sorted(filter(None, known))
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return Mistake(f"Unknown {what} '{name}': {hint}There are: {', '.join(known) or 'none'}.")
