"""What a site keeps between orders, on its own disk: whole after any crash, and never applied twice.

A folder for each run: `index.json` names the files that count, everything else is swept away. An order is carried out on the
state before it; its outcome counts once the index says so. Three things can then happen to it:

- the same order comes again (the reply was lost): the reply that was kept is given, nothing is run twice;
- the next order says that the server did not take the reply (it came too late): the state goes back to before the step;
- the server starts a new life from its checkpoint: the state goes back to before the round that is run again.
"""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.net.frames import Head, place
from kilter.records import wire
from kilter.records.run_folder import cannot_write, write

EMPTY: dict[str, Any] = {
    "life": "",  # of the server
    "mark": None,  # [round, seq] of the last order that changed my state
    "state": None,  # the file that holds my state; None: nothing yet
    "undo": None,  # my state before that order
    "base": None,  # my state before that order's round
    "base_round": None,
    "reply": None,  # {"head": ..., "file": ...} that I gave to that order
    "next": 0,  # number of the next file
}


class Keep:
    """One run's folder at a site."""

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise Mistake("The server's run has a name that is not one of ours.")
        self.folder = folder / run
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115 - held as long as we live
        except OSError as e:
            raise cannot_write(self.folder, e) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Mistake(f"Another process works in '{self.folder}': give each site its own --state-dir.") from None
        self._load()

    def _load(self) -> None:
        path = self.folder / "index.json"
        try:
            self.index: dict[str, Any] = {**EMPTY, **json.loads(path.read_text())} if path.exists() else dict(EMPTY)
        except (OSError, ValueError, TypeError):
            raise Mistake(f"'{path}' is damaged: remove the folder to begin this run anew at this site.") from None

    def close(self) -> None:
        self._lock.close()

    def state(self) -> dict[str, Tree]:
        """My state, fresh from the disk."""
        if self.index["state"] is None:
            return {}
        path = self.folder / self.index["state"]
        try:
            found: dict[str, Tree] = wire.decode(path.read_bytes())
            return found
        except (OSError, wire.Malformed):
            raise Mistake(f"'{path}' is damaged: remove the folder to begin this run anew at this site.") from None

    def begin(self, order: Head) -> tuple[Head, bytes] | None:
        """Bring my state to where this order wants it; the reply I gave, if I have carried it out before."""
        i, at = dict(self.index), place(order)
        if i["life"] != order["life"]:
            if i["mark"] is not None and i["mark"][0] >= order["since"]:
                if i["base_round"] != order["since"]:
                    raise Mistake(
                        f"the server went back to round {order['since']}, before what this site keeps (round {i['base_round']})"
                    )
                i |= {"state": i["base"], "mark": None, "undo": None, "reply": None}
            i["life"] = order["life"]
        mark = None if i["mark"] is None else tuple(i["mark"])
        if mark is not None and at <= mark:
            if at < mark or i["reply"] is None:
                raise wire.Malformed("an order came out of turn")
            return i["reply"]["head"], (self.folder / i["reply"]["file"]).read_bytes()
        if mark is not None and tuple(order["took"] or (-1, 0)) < mark:
            i |= {"state": i["undo"], "mark": None, "undo": None, "reply": None}
            self._commit(i)  # at once: a later order would not tell
        if i["base_round"] != at[0]:
            i |= {"base": i["state"], "base_round": at[0]}
        self.index = i
        return None

    def finish(self, order: Head, state: dict[str, Tree], head: Head, body: bytes) -> None:
        """This order changed my state: keep the new one and what I am going to answer."""
        i = dict(self.index)
        number = i["next"]
        new, answer = f"{number}.safetensors", f"{number}.reply"
        write(self.folder / new, wire.encode(state))
        write(self.folder / answer, body)
        i |= {"mark": list(place(order)), "undo": i["state"], "state": new, "next": number + 1}
        i["reply"] = {"head": head, "file": answer}
        self._commit(i)

    def _commit(self, index: dict[str, Any]) -> None:
        write(self.folder / "index.json", json.dumps(index))
        self.index = index
        live = {index["state"], index["undo"], index["base"], "index.json", ".lock", "seal.key"}
        live.add(index["reply"]["file"] if index["reply"] else None)
        for path in self.folder.iterdir():
            if path.name not in live:
                path.unlink(missing_ok=True)
