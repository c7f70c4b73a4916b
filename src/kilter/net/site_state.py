"""What a site keeps between orders, on its own disk: whole after any crash, never applied twice, and never used if altered.

A folder for each run: `index.json` names the files that count, with their checksums; other files are removed. An order runs on the
state before it, and its outcome counts once the index says so. Three things can then happen:

- the same order comes again, because the reply was lost: the site sends the reply it stored and runs nothing;
- the next order says that the server did not accept the reply (it came too late): the state goes back to before the step;
- the server starts a new session from its checkpoint: the state goes back to before the round that is run again.

The state is bound to its directory (`instance`) and counts its changes (`generation`). Server and site compare both, so that a
lost, copied or exchanged state directory is noticed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.net.fields import HEX, Place
from kilter.net.frames import Head
from kilter.net.messages import Order, Reply, StateMark
from kilter.net.versions import Steps, upgraded
from kilter.records import wire
from kilter.records.checksums import checksum
from kilter.records.run_folder import cannot_write, write

VERSION = 2  # of index.json
UPGRADES: Steps = {1: lambda plain: plain}  # release 0.1 wrote no version; the fields are the same


def lock(path: Path, why: str) -> TextIOWrapper:
    """Hold this lock file as long as the returned file is open."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "w")
    except OSError as e:
        raise cannot_write(path, e) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise Mistake(why) from None
    return file


def private_seed(folder: Path) -> int:
    """The seed of a node's secrets, in a file that only its owner can read. It is drawn once and outlives restarts."""
    path = folder / "secret"
    try:
        if not path.exists():
            with os.fdopen(os.open(path.with_name("secret.new"), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
            os.replace(path.with_name("secret.new"), path)
        return int(path.read_text(), 16)
    except OSError as e:
        raise cannot_write(path, e) from None
    except ValueError:
        raise Mistake(f"'{path}' is damaged: restore the state directory, or use a new one.") from None


class StateDirectory:
    """The directory of one site (`--state-dir`): one process at a time, and a name of its own that outlives restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = lock(folder / ".lock", f"Another process works in '{folder}': give each site its own --state-dir.")
        os.chmod(folder, 0o700)
        path = folder / "instance"
        if not path.exists():
            write(path, secrets.token_hex(16))
        self.instance = path.read_text(errors="replace")
        if not HEX.fullmatch(self.instance):
            raise Mistake(f"'{path}' is damaged: restore the state directory, or use a new one.")
        self.private_seed = private_seed(folder)

    def close(self) -> None:
        self._lock.close()


@dataclass(frozen=True)
class StoredFile:
    """A file that the index names."""

    file: str
    checksum: str
    generation: int = 0  # of states: how often the state was changed up to here


@dataclass(frozen=True)
class Index:
    """What counts in a run's folder."""

    session: str = ""  # of the server
    mark: Place | None = None  # the last order that changed the state
    state: StoredFile | None = None  # None: nothing yet
    undo: StoredFile | None = None  # the state before that order
    base: StoredFile | None = None  # the state before that order's round
    base_round: int | None = None
    reply: StoredFile | None = None  # what the site answered to that order
    reply_head: Head | None = None
    next_file: int = 0

    def text(self) -> str:
        plain = json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)
        return json.dumps({"checksum": checksum(plain.encode()), "index": plain})

    @staticmethod
    def read(text: str, path: Path) -> Index:
        """ValueError or TypeError if the text was altered; a Mistake if a newer release wrote it."""
        outer = json.loads(text)
        if checksum(outer["index"].encode()) != outer["checksum"]:
            raise ValueError
        plain: dict[str, Any] = upgraded(json.loads(outer["index"]), VERSION, UPGRADES, path)
        del plain["version"]
        stored = {k: StoredFile(**plain[k]) for k in ("state", "undo", "base", "reply") if plain[k] is not None}
        mark = None if plain["mark"] is None else (plain["mark"][0], plain["mark"][1])
        return Index(**{**plain, "mark": mark, **stored})


class SiteState:
    """One run's folder at a site."""

    def __init__(self, directory: StateDirectory, run: str, most_megabytes: int = 0) -> None:
        if not HEX.fullmatch(run):
            raise Mistake("The server's run has a name that cannot be one.")
        self.instance, self._most = directory.instance, most_megabytes * 2**20
        self.folder = directory.folder / run
        self._lock = lock(self.folder / ".lock", f"Another process works in '{self.folder}'.")
        path = self.folder / "index.json"
        try:
            self.index = Index.read(path.read_text(), path) if path.exists() else Index()
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            raise self._damaged(path) from None

    def _damaged(self, path: Path) -> Mistake:
        return Mistake(
            f"'{path}' was altered or damaged: restore the state directory from a backup, or leave this run."
        )

    def close(self) -> None:
        self._lock.close()

    @property
    def mark(self) -> StateMark:
        """Which directory this is, and how often the state was changed."""
        return StateMark(self.instance, self.index.state.generation if self.index.state else 0)

    def _read(self, stored: StoredFile) -> bytes:
        path = self.folder / stored.file
        try:
            data = path.read_bytes()
        except OSError:
            raise self._damaged(path) from None
        if checksum(data) != stored.checksum:
            raise self._damaged(path)
        return data

    def state(self) -> dict[str, Tree]:
        """The state, read from disk."""
        if self.index.state is None:
            return {}
        state: dict[str, Tree] = wire.decode(self._read(self.index.state))
        return state

    def begin(self, order: Order) -> tuple[Reply, bytes] | None:
        """Bring the state to where this order needs it; the stored reply, if the order was carried out before."""
        index = self.index
        if index.session != order.session:
            if index.mark is not None and index.mark[0] >= order.session_round:
                if order.session_round == 0:  # the run begins again
                    index = Index(next_file=index.next_file)
                elif index.base_round != order.session_round:
                    raise Mistake(
                        f"The server went back to round {order.session_round}, and this site keeps round {index.base_round}."
                    )
                else:
                    index = replace(index, state=index.base, mark=None, undo=None, reply=None, reply_head=None)
            index = replace(index, session=order.session)
        if index.mark is not None and order.place <= index.mark:
            if order.place < index.mark or index.reply is None or index.reply_head is None:
                raise wire.Malformed("an order came out of turn")
            return Reply.parse(index.reply_head), self._read(index.reply)
        if index.mark is not None and (order.accepted or (-1, 0)) < index.mark:
            index = replace(index, state=index.undo, mark=None, undo=None, reply=None, reply_head=None)
            self._commit(index)  # at once: a later order would not tell
        self._compare(order, index.state.generation if index.state else 0)
        if index.base_round != order.round:
            index = replace(index, base=index.state, base_round=order.round)
        self.index = index
        return None

    def _compare(self, order: Order, generation: int) -> None:
        """The server must have accepted exactly the changes that this directory holds."""
        known = order.state or StateMark()
        if generation != known.generation or (generation and known.instance != self.instance):
            raise Mistake(
                f"The state directory does not fit the run: it holds {generation} changes and the server knows of "
                f"{known.generation} (lost, restored from an old copy, or used twice?)."
            )

    def finish(self, order: Order, state: dict[str, Tree], reply: Reply, body: bytes) -> Reply:
        """This order changed the state: store it, and what the site answers. The reply as it is to be sent."""
        index = self.index
        data = wire.encode(state)
        if self._most and len(data) > self._most:
            raise Mistake(
                f"The method wants to keep {len(data)} bytes here, and this site's policy allows {self._most}."
            )
        generation = (index.state.generation if index.state else 0) + 1
        new = StoredFile(f"{index.next_file}.safetensors", checksum(data), generation)
        answer = StoredFile(f"{index.next_file}.reply", checksum(body))
        write(self.folder / new.file, data)
        write(self.folder / answer.file, body)
        reply = replace(reply, state=StateMark(self.instance, generation))
        changed = replace(index, mark=order.place, undo=index.state, state=new, next_file=index.next_file + 1)
        self._commit(replace(changed, reply=answer, reply_head=reply.head()))
        return reply

    def _commit(self, index: Index) -> None:
        write(self.folder / "index.json", index.text())
        self.index = index
        stored = [s.file for s in (index.state, index.undo, index.base, index.reply) if s]
        for path in self.folder.iterdir():
            if path.name not in (*stored, "index.json", ".lock"):
                path.unlink(missing_ok=True)
