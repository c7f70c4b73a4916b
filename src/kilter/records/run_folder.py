"""A run folder: everything needed to read, repeat and resume a run. No file in it can be torn, none holds a pickle.

experiment.toml         what to run, with versions (written by the command line)
rounds.jsonl            one line a round
clients.json            every client's evaluation, at the last round and at the best
summary.json            the result
model.safetensors       the global model, names as in the module (last round)
checkpoint.safetensors  where to go on; nodes/ID@ROUND.safetensors: what each node keeps, rewritten only when it changed
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import ReferenceType, ref

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.records import checksums, wire

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no such lock: there, nothing stops two processes from using one folder
    fcntl = None  # type: ignore[assignment]

CHECKPOINT = "checkpoint.safetensors"


def write(path: Path, data: bytes | str) -> None:
    """All of it or nothing: written beside, synced, then renamed over."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(new, path)
    except OSError as e:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise cannot_write(path, e) from None


def cannot_write(path: Path, e: OSError) -> Mistake:
    """A disk that is full, or not ours: what is there stays whole."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return Mistake(
            f"The disk is full: '{path}' could not be written. Free some space, then resume the run; nothing is lost."
        )
    return Mistake(f"'{path}' could not be written: {e.strerror}.")


class Store:
    """The folder of one run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            (self.folder / "nodes").mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115 - held as long as the store
        except OSError as e:
            raise cannot_write(self.folder, e) from None
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Mistake(
                f"Another process is working in '{self.folder}': wait for it, or choose another folder."
            ) from None
        self._versions: dict[str, int] = {}
        self._sums: dict[str, str] = {}  # of the node files
        if hasattr(os, "register_at_fork"):  # a worker may outlive us and must not hold the lock
            os.register_at_fork(after_in_child=partial(_close, ref(self)))

    def close(self) -> None:
        self._lock.close()

    def path(self, name: str) -> Path:
        return self.folder / name

    # Rounds ---------------------------------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line of rounds.jsonl."""
        try:
            with open(self.path("rounds.jsonl"), "a") as f:
                f.write(json.dumps(record) + "\n")
        except OSError as e:
            raise cannot_write(self.path("rounds.jsonl"), e) from None

    def rounds(self) -> list[dict[str, Any]]:
        """The whole lines of rounds.jsonl; a torn last one does not count."""
        return read_rounds(self.folder)

    def rewind(self, upto: int) -> list[dict[str, Any]]:
        """Forget the rounds after this one: they will be run again."""
        kept = [r for r in self.rounds() if r["round"] <= upto]
        write(self.path("rounds.jsonl"), "".join(json.dumps(r) + "\n" for r in kept))
        return kept

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _node(self, name: str, version: int) -> Path:
        return self.path("nodes") / f"{quote(name, safe='')}@{version}.safetensors"

    def save(self, round: int, progress: Tree, states: Mapping[str, Tree], changed: Iterable[str]) -> None:
        """Node states that changed, then the file that makes them count, then away with the old ones."""
        versions, sums = dict(self._versions), dict(self._sums)
        for name in changed:
            data = wire.encode(states[name])
            write(self._node(name, round), data)
            versions[name], sums[name] = round, checksums.checksum(data)
        saved = {"round": round, "nodes": versions, "checksums": sums, "rounds": self._rounds_sum()}
        write(self.path(CHECKPOINT), wire.encode({**saved, "progress": progress}, checked=True))
        self._versions, self._sums = versions, sums
        self._clean()

    def load(self) -> tuple[int, Tree, dict[str, Tree]] | None:
        """(round, progress, node states) of the last checkpoint, if there is one."""
        if not self.path(CHECKPOINT).exists():
            self._clean()
            return None
        try:
            saved = wire.decode(self.path(CHECKPOINT).read_bytes())
            if not isinstance(saved, dict):
                raise wire.Malformed("a checkpoint is a dict")
            self._versions = saved["nodes"]
            self._sums = dict(saved.get("checksums", {}))  # none in checkpoints of older runs
            states = {name: self._load_node(name, v) for name, v in self._versions.items()}
            if "rounds" in saved and saved["rounds"] != self._rounds_sum(saved["round"]):
                raise checksums.altered(self.path("rounds.jsonl"))
            found = saved["round"], saved["progress"], states
        except (wire.Malformed, OSError, LookupError, TypeError, AttributeError):
            raise Mistake(
                f"'{self.folder}' has a checkpoint that cannot be read: it is damaged or from something else."
            ) from None
        self._clean()
        return found

    def _load_node(self, name: str, version: int) -> Tree:
        path = self._node(name, version)
        data = path.read_bytes()
        if name in self._sums and self._sums[name] != checksums.checksum(data):
            raise checksums.altered(path)
        return wire.decode(data)

    def _rounds_sum(self, upto: int | None = None) -> str:
        """The checksum of all records, which are then safe on disk; or of those up to a round."""
        path = self.path("rounds.jsonl")
        if not path.exists():
            return checksums.checksum(b"")
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            data = f.read()
        if upto is not None:
            lines = data.splitlines(keepends=True)
            data = b"".join(line for line in lines if (number := _round_of(line)) is not None and number <= upto)
        return checksums.checksum(data)

    def _clean(self) -> None:
        live = {self._node(name, v).name for name, v in self._versions.items()}
        for path in self.path("nodes").glob("*@*.safetensors*"):
            if path.name not in live:
                path.unlink(missing_ok=True)

    # Results --------------------------------------------------------------------------------------------------------

    def finish(self, summary: Mapping[str, Any], clients: Mapping[str, Any]) -> None:
        """The result; summary.json comes last and so says that the run is done."""
        text = json.dumps(summary, indent=2) + "\n"
        write(self.path("clients.json"), json.dumps(clients))
        sums = checksums.of_files(self.folder, ("rounds.jsonl", "clients.json", "model.safetensors"))
        sums["summary.json"] = checksums.checksum(text.encode())
        write(self.path(checksums.FILE), json.dumps(sums, indent=2) + "\n")
        write(self.path("summary.json"), text)


def _round_of(line: bytes) -> int | None:
    """The round of a whole line of rounds.jsonl."""
    try:
        number = json.loads(line)["round"]
    except (ValueError, LookupError, TypeError):
        return None
    return number if isinstance(number, int) else None


def _close(store: ReferenceType[Store]) -> None:
    found = store()
    if found is not None:
        found.close()


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's rounds.jsonl."""
    path = folder / "rounds.jsonl"
    data = path.read_bytes() if path.exists() else b""
    checksums.verify(folder, path.name, data)
    found: list[dict[str, Any]] = []
    for line in data.decode(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
