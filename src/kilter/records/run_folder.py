"""A run folder: everything needed to read, repeat and resume a run. Every file is written whole or not at all.

experiment.toml         what to run, with versions (written by the command line)
rounds.jsonl            one `Round` a line
clients.json            `Clients`: every client's evaluation, at the last round and at the best
summary.json            `Summary`: the result
partition.json          `Partition`: which rows a simulation gave its clients
model.toml              how to build the network; what its inputs and outputs are
model.safetensors       the global model of the last round, with the module's own names; best.safetensors: of the best round
personal/ID.safetensors a client's own model
README.md               a model card
checkpoint.safetensors  where to resume; nodes/ID@ROUND.safetensors: each node's state, rewritten only when it changed
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote
from weakref import ReferenceType, ref

from kilter.core import Params, Tree
from kilter.errors import Mistake
from kilter.records import checksums, wire
from kilter.records.codec import NewerFormat, Unreadable, from_json, from_tree, to_json, to_tree
from kilter.records.files import cannot_write as cannot_write
from kilter.records.files import write as write
from kilter.records.lock import hold
from kilter.records.model_info import BEST, LAST, PERSONAL
from kilter.records.types import Checkpoint, Clients, Partition, Round, Summary

CHECKPOINT = "checkpoint.safetensors"


@dataclass
class Saved:
    """The content of a checkpoint."""

    at: Checkpoint
    state: Tree
    role: str  # who holds the aggregator's role (rotating)
    experiment: dict[str, object] | None  # the settings it was written under, where known
    nodes: dict[str, dict[str, Tree]]  # node states


class Store:
    """The folder of one run, locked against other processes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            (self.folder / "nodes").mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115 - held as long as the store
        except OSError as e:
            raise cannot_write(self.folder, e) from None
        if not hold(self._lock):
            raise Mistake(f"Another process is working in '{self.folder}': wait for it, or choose another folder.")
        self._versions: dict[str, int] = {}
        self._sums: dict[str, str] = {}  # of the node files
        if hasattr(os, "register_at_fork"):  # a worker that outlives us must not hold the lock
            os.register_at_fork(after_in_child=partial(_close, ref(self)))

    def close(self) -> None:
        self._lock.close()

    def path(self, name: str) -> Path:
        return self.folder / name

    # Rounds ---------------------------------------------------------------------------------------------------------

    def append(self, record: Round) -> None:
        """Add a line to rounds.jsonl."""
        try:
            with open(self.path("rounds.jsonl"), "a") as f:
                f.write(to_json(record) + "\n")
        except OSError as e:
            raise cannot_write(self.path("rounds.jsonl"), e) from None

    def rounds(self) -> list[Round]:
        """The rounds on record."""
        return read_rounds(self.folder)

    def rewrite(self, rounds: Iterable[Round]) -> None:
        """Replace rounds.jsonl."""
        write(self.path("rounds.jsonl"), "".join(to_json(record) + "\n" for record in rounds))

    def rewind(self, upto: int) -> list[Round]:
        """Remove the rounds after this one, which will be run again; the rounds that remain."""
        kept = [record for record in self.rounds() if record.round <= upto]
        self.rewrite(kept)
        return kept

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _node(self, name: str, version: int) -> Path:
        return self.path("nodes") / f"{quote(name, safe='')}@{version}.safetensors"

    def save(self, saved: Saved, changed: Iterable[str], rounds_follow: bool = False) -> None:
        """Write the node states that changed, then the checkpoint that refers to them, then delete the old ones.

        With `rounds_follow`, rounds.jsonl may change before the next checkpoint, so its checksum is left out.
        """
        versions, sums = dict(self._versions), dict(self._sums)
        for name in changed:
            data = wire.encode(saved.nodes[name])
            write(self._node(name, saved.at.round), data)
            versions[name], sums[name] = saved.at.round, checksums.checksum(data)
        tree: dict[str, Tree] = {
            "round": saved.at.round,
            "nodes": versions,
            "checksums": sums,
            "progress": {"progress": to_tree(saved.at), "state": saved.state, "role": saved.role},
            "experiment": saved.experiment,
        }
        if not rounds_follow:
            tree["rounds"] = self._rounds_sum()
        write(self.path(CHECKPOINT), wire.encode(tree, checked=True))
        self._versions, self._sums = versions, sums
        self._clean()

    def load(self) -> Saved | None:
        """The last checkpoint, if there is one."""
        if not self.path(CHECKPOINT).exists():
            self._clean()
            return None
        try:
            tree = wire.decode(self.path(CHECKPOINT).read_bytes())
            if not isinstance(tree, dict):
                raise wire.Malformed("a checkpoint is a dict")
            self._versions = tree["nodes"]
            self._sums = dict(tree.get("checksums", {}))  # none in checkpoints of older runs
            nodes = {name: self._load_node(name, v) for name, v in self._versions.items()}
            if "rounds" in tree and tree["rounds"] != self._rounds_sum(tree["round"]):
                raise checksums.altered(self.path("rounds.jsonl"))
            progress = tree["progress"]
            at = from_tree(Checkpoint, progress["progress"])
            saved = Saved(at, progress["state"], progress["role"], tree.get("experiment"), nodes)
        except NewerFormat as e:
            raise Mistake(f"The checkpoint in '{self.folder}' cannot be read: {e}.") from None
        except (Unreadable, wire.Malformed, OSError, LookupError, TypeError, AttributeError):
            raise Mistake(
                f"'{self.folder}' has a checkpoint that cannot be read: it is damaged or from another program."
            ) from None
        self._clean()
        return saved

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

    def save_model(self, model: Params, names: Mapping[str, str], file: str = LAST) -> None:
        """Write a model; `names` maps the module's names to ours."""
        write_model(self.path(file), model, names)

    def save_best(self, model: Params, names: Mapping[str, str], round: int, keep: int | None = None) -> None:
        """Write the best model, of this round. If the run is at its end, keep that of round `keep`, in case it is extended."""
        if keep is not None and model_round(self.path(BEST)) == keep:
            os.replace(self.path(BEST), self.path("nodes") / BEST)
        write_model(self.path(BEST), model, names, round)

    def read_best(self, names: Mapping[str, str]) -> Params | None:
        """The best model, if there is one; `names` maps the module's names to ours."""
        from safetensors.torch import load

        if not self.path(BEST).exists():
            return None
        stored = load(self.path(BEST).read_bytes())  # in any order
        return {ours: stored[name] for name, ours in names.items() if name in stored}

    def restore_best(self) -> None:
        """Bring back the best model before the last evaluation."""
        if (self.path("nodes") / BEST).exists():
            os.replace(self.path("nodes") / BEST, self.path(BEST))

    def save_personal(self, client: str, model: Params, names: Mapping[str, str]) -> None:
        """Write a client's own model."""
        self.path(PERSONAL).mkdir(exist_ok=True)
        self.save_model(model, names, personal_file(client))

    def save_partition(self, partition: Partition) -> None:
        """Write partition.json."""
        write(self.path("partition.json"), to_json(partition))

    def finish(self, summary: Summary, clients: Clients) -> None:
        """Write the result. summary.json comes last and so marks the run as finished."""
        text = to_json(summary, indent=2) + "\n"
        write(self.path("clients.json"), to_json(clients))
        sums = checksums.of_files(self.folder, ("rounds.jsonl", "clients.json", LAST, BEST, f"nodes/{BEST}"))
        sums["summary.json"] = checksums.checksum(text.encode())
        write(self.path(checksums.FILE), json.dumps(sums, indent=2) + "\n")
        write(self.path("summary.json"), text)

    def reopen(self) -> None:
        """Mark a finished run as unfinished. A best model that was damaged since then is refused."""
        kept = self.path("nodes") / BEST
        if kept.exists():
            checksums.verify(self.folder, f"nodes/{BEST}", kept.read_bytes())
        self.path("summary.json").unlink(missing_ok=True)
        self.path(checksums.FILE).unlink(missing_ok=True)


def personal_file(client: str) -> str:
    """The name of the file of a client's own model."""
    return f"{PERSONAL}/{quote(client, safe='')}.safetensors"


def write_model(path: Path, model: Params, names: Mapping[str, str], round: int | None = None) -> None:
    """Write a model with the names of its module, and the round it is from, if that matters."""
    from safetensors.torch import save

    plain = {theirs: model[ours].contiguous() for theirs, ours in names.items() if ours in model}
    write(path, save(plain, None if round is None else {"round": str(round)}))


def model_round(path: Path) -> int | None:
    """The round that a model is from; None if there is no such file, or if it does not say."""
    from safetensors import safe_open

    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get("round", "")
    return int(text) if text.isdecimal() else None


def _round_of(line: bytes) -> int | None:
    """The round of a whole line of rounds.jsonl."""
    try:
        number = json.loads(line)["round"]
    except (ValueError, LookupError, TypeError):
        return None
    return number if isinstance(number, int) else None


def _close(store: ReferenceType[Store]) -> None:
    alive = store()
    if alive is not None:
        alive.close()


# Reading a folder that another process may hold ---------------------------------------------------------------------


def read_rounds(folder: Path) -> list[Round]:
    """The whole lines of a run's rounds.jsonl; an incomplete last line does not count."""
    path = folder / "rounds.jsonl"
    data = path.read_bytes() if path.exists() else b""
    checksums.verify(folder, path.name, data)
    rounds: list[Round] = []
    for line in data.decode(errors="replace").splitlines():
        try:
            rounds.append(from_json(Round, line))
        except NewerFormat as e:
            raise Mistake(f"'{path}' cannot be read: {e}.") from None
        except Unreadable:
            break
    return rounds


def _verified(folder: Path, name: str) -> bytes:
    """The content of a file, which must be as the run wrote it."""
    data = (folder / name).read_bytes()
    checksums.verify(folder, name, data)
    return data


def read_summary(folder: Path) -> Summary:
    """A run's summary.json."""
    try:
        return from_json(Summary, _verified(folder, "summary.json"))
    except OSError:
        raise Mistake(f"'{folder}' holds no finished run: it has no summary.json.") from None
    except Unreadable as e:
        raise Mistake(f"'{folder}' holds a summary.json that cannot be read: {e}.") from None


def read_clients(folder: Path) -> Clients:
    """A run's clients.json."""
    try:
        return from_json(Clients, _verified(folder, "clients.json"))
    except OSError as e:
        raise Mistake(f"'{folder}' is damaged: its clients.json cannot be read: {e.strerror}.") from None
    except Unreadable as e:
        raise Mistake(f"'{folder}' holds a clients.json that cannot be read: {e}.") from None


def read_partition(folder: Path) -> Partition | None:
    """A run's partition.json, where there is one."""
    try:
        return from_json(Partition, (folder / "partition.json").read_bytes())
    except FileNotFoundError:
        return None
    except OSError as e:
        raise Mistake(f"'{folder}' is damaged: its partition.json cannot be read: {e.strerror}.") from None
    except Unreadable as e:
        raise Mistake(f"'{folder}' holds a partition.json that cannot be read: {e}.") from None
