"""Versions: which protocols this release speaks, and how it reads what older releases left on disk.

A site names the range of protocols it speaks; the server uses the newest that both speak, and a refusal says which side to update.
Tables on disk (`run.json` of a server, `index.json` of a site's state) carry a version. An older one goes through one step for each
version in between; a newer one is refused. Records in run folders have a format of their own (`kilter.records.upgrade`).

protocol 3   release 0.1
protocol 4   ranges of protocols; the chosen protocol in the terms; a place in a trace in orders; sites that
             aggregate in turn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kilter import __version__
from kilter.errors import Malformed, Mistake

PROTOCOLS = (3, 4)  # oldest and newest that this release speaks
Table = dict[str, object]
Steps = Mapping[int, Callable[[Table], Table]]  # from this version to the next


def common_protocol(theirs: tuple[int, int], side: str = "site") -> int:
    """The newest protocol that both sides speak; `Malformed` says which side to update. `side`: what the other one is."""
    newest = min(PROTOCOLS[1], theirs[1])
    if newest < PROTOCOLS[0]:
        raise Malformed(
            f"it speaks protocols up to {theirs[1]}, and kilter {__version__} here needs {PROTOCOLS[0]}: "
            f"update kilter at the {side}"
        )
    if newest < theirs[0]:
        here = "server" if side == "site" else "site" if side == "server" else "other peer"
        raise Malformed(
            f"it needs protocol {theirs[0]}, and kilter {__version__} here speaks protocols up to {PROTOCOLS[1]}: "
            f"update kilter at the {here}"
        )
    return newest


def read_range(head: Mapping[str, object]) -> tuple[int, int]:
    """The protocols in a hello: a range, or the only one of an older release."""
    low, high = head.get("protocol"), head.get("protocol")
    if isinstance(listed := head.get("protocols"), list) and len(listed) == 2:
        low, high = listed
    if not all(isinstance(v, int) and not isinstance(v, bool) and 0 < v < 10**6 for v in (low, high)):
        raise Malformed("a hello without the protocols that its sender speaks")
    assert isinstance(low, int)
    assert isinstance(high, int)
    return low, high


def upgraded(stored: Table, newest: int, steps: Steps, path: object) -> Table:
    """A table from disk as this release has it; a Mistake if a newer release wrote it. Tables without a version have version 1."""
    version = stored.get("version", 1)
    if not isinstance(version, int) or version < 1:
        raise Mistake(f"'{path}' is damaged: its version is not a number.")
    if version > newest:
        raise Mistake(
            f"'{path}' was written by a newer release of kilter (version {version}, and {__version__} reads up to "
            f"{newest}): update kilter here."
        )
    for step in range(version, newest):
        stored = steps[step](dict(stored))
    return {**stored, "version": newest}
