"""A user's mistake: one sentence that says what is wrong and what to do. The command line prints it and exits with 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Mistake(Exception):
    """Bad input from outside (config, data, message, file). Never raised for a bug of ours."""


def unknown(what: str, name: str, known: Iterable[str]) -> Mistake:
    """The mistake of naming something that is not there, with the nearest right name.

    >>> print(unknown("method", "fedporx", ["fedavg", "fedprox"]))
    Unknown method 'fedporx': did you mean 'fedprox'? There are: fedavg, fedprox.
    """
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return Mistake(f"Unknown {what} '{name}': {hint}There are: {', '.join(known)}.")
