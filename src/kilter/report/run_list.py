"""All runs and studies below a folder, finished or not: what a list of them shows, kept up to date by looking at the files."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kilter.errors import Mistake
from kilter.records.run_folder import read_summary

State = Literal["running", "finished", "stopped", "unreadable"]
QUIET_SECONDS = 60.0  # a run that has recorded nothing for so long, and for five of its rounds, counts as stopped
DEPTH = 4  # folders below the one that is listed


@dataclass(frozen=True)
class ListedRun:
    """A run or a study in a list."""

    folder: str  # below the folder that is listed
    kind: Literal["run", "study"]
    state: State
    method: str = ""
    data: str = ""
    seed: int | None = None
    round: int = 0
    rounds: int = 0
    seconds_left: float | None = None
    loss: float | None = None
    metric: str = "accuracy"  # what the two scores are
    score: float | None = None  # the global model's
    client_score: float | None = None  # mean over the clients
    failures: int = 0
    notices: int = 0
    bytes: int = 0
    updated: float = 0.0  # seconds since 1970


@dataclass
class _Progress:
    """What has been read of a rounds.jsonl that may grow."""

    offset: int = 0
    round: int = 0
    loss: float | None = None
    metric: str = "accuracy"
    score: float | None = None
    client_score: float | None = None
    failures: int = 0
    notices: int = 0
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)


class RunList:
    """Looks for runs and studies below a folder. `look` reads only what has changed since it was called last."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise Mistake(f"'{root}' is not a folder: name a folder with runs or studies.")
        self.root = root
        self._progress: dict[Path, _Progress] = {}
        self._settings: dict[Path, tuple[float, dict[str, object]]] = {}
        self._entries: dict[Path, tuple[tuple[float, ...], ListedRun]] = {}

    def look(self) -> list[ListedRun]:
        """The entries now, the most recent first."""
        entries: dict[Path, tuple[tuple[float, ...], ListedRun]] = {}
        for folder in _folders(self.root, DEPTH):
            with suppress(OSError):  # deleted while we look
                stamp = _stamp(folder)
                known = self._entries.get(folder)
                if known and known[0] == stamp and known[1].state != "running":
                    entries[folder] = known
                else:
                    entries[folder] = stamp, self._read(folder, stamp)
        for table in (self._progress, self._settings):
            for gone in table.keys() - entries.keys():
                del table[gone]
        self._entries = entries
        return sorted((entry for _, entry in entries.values()), key=lambda e: (-e.updated, e.folder))

    def _read(self, folder: Path, stamp: tuple[float, ...]) -> ListedRun:
        name = str(folder.relative_to(self.root)) if folder != self.root else folder.name
        if (folder / "study.toml").exists():
            return self._study(folder, name, max(stamp))
        settings = self._read_settings(folder)
        base: dict[str, object] = {
            "folder": name,
            "kind": "run",
            "method": str(settings.get("method", "")),
            "data": ", ".join(str(settings[k]) for k in ("data", "partition") if k in settings),
            "seed": settings.get("seed") if isinstance(settings.get("seed"), int) else None,
            "updated": max(stamp),
        }
        rounds = settings.get("rounds")
        planned = rounds if isinstance(rounds, int) else 0
        if (folder / "summary.json").exists():
            try:
                summary = read_summary(folder)
            except Mistake:
                return ListedRun(**base, state="unreadable", rounds=planned)  # type: ignore[arg-type]
            base |= {"method": base["method"] or summary.method, "seed": summary.seed}
            main, last = summary.chosen_by, summary.last
            return ListedRun(
                **base,  # type: ignore[arg-type]
                state="finished",
                round=summary.rounds,
                rounds=summary.rounds,
                metric=main,
                score=last.scores.metrics.get(main) if last.scores else None,
                client_score=last.client[main].mean if main in last.client else None,
                failures=summary.failures,
                notices=len(summary.notices),
                bytes=summary.bytes_up + summary.bytes_down,
            )
        at = self._follow(folder)
        mean = sum(at.seconds[-20:]) / len(at.seconds[-20:]) if at.seconds else None
        quiet = time.time() - max(stamp)
        stopped = quiet > max(QUIET_SECONDS, 5 * (mean or 0))
        return ListedRun(
            **base,  # type: ignore[arg-type]
            state="stopped" if stopped else "running",
            round=at.round,
            rounds=planned,
            seconds_left=None if stopped or mean is None else mean * max(0, planned - at.round),
            loss=at.loss,
            metric=at.metric,
            score=at.score,
            client_score=at.client_score,
            failures=at.failures,
            notices=at.notices,
            bytes=at.bytes,
        )

    def _study(self, folder: Path, name: str, updated: float) -> ListedRun:
        done = sum((run / "summary.json").exists() for run in _children(folder / "runs"))
        finished = (folder / "results.json").exists()
        stopped = (
            time.time() - max(updated, *(_stamp_of(run) for run in _children(folder / "runs")), 0.0) > QUIET_SECONDS
        )
        state: State = "finished" if finished else "stopped" if stopped else "running"
        return ListedRun(name, "study", state, method="study", round=done, rounds=0, updated=updated)

    def _read_settings(self, folder: Path) -> dict[str, object]:
        path = folder / "experiment.toml"
        with suppress(OSError, ValueError):
            changed = path.stat().st_mtime
            known = self._settings.get(folder)
            if known is None or known[0] != changed:
                self._settings[folder] = changed, tomllib.loads(path.read_text())
            return self._settings[folder][1]
        return {}

    def _follow(self, folder: Path) -> _Progress:
        """Read the lines of rounds.jsonl that are new. A run that resumes may rewrite the file with fewer."""
        path = folder / "rounds.jsonl"
        at = self._progress.setdefault(folder, _Progress())
        size = path.stat().st_size if path.exists() else 0
        if size < at.offset:
            at = self._progress[folder] = _Progress()
        if size == at.offset:
            return at
        with open(path, "rb") as f:
            f.seek(at.offset)
            data = f.read()
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # not written completely yet
            at.offset += len(line)
            with suppress(ValueError, TypeError, KeyError, AttributeError):  # a damaged line shows nothing
                _add(at, json.loads(line))
        return at


def _add(at: _Progress, record: dict[str, object]) -> None:
    """Take over what a line of rounds.jsonl says."""
    at.round = int(str(record["round"]))
    loss, scores, clients = record.get("loss"), record.get("global_metrics"), record.get("client")
    at.loss = float(loss) if isinstance(loss, int | float) else at.loss
    scores, clients = (part if isinstance(part, dict) else {} for part in (scores, clients))
    if names := [*scores, *clients]:
        at.metric = "accuracy" if "accuracy" in names else str(names[0])
        at.score = scores.get(at.metric)
        at.client_score = clients[at.metric]["mean"] if at.metric in clients else None
    for name in ("failures", "notices"):
        listed = record.get(name)
        setattr(at, name, getattr(at, name) + (len(listed) if isinstance(listed, list) else 0))
    at.bytes += int(str(record.get("bytes_up", 0))) + int(str(record.get("bytes_down", 0)))
    if at.round:
        at.seconds.append(float(str(record.get("seconds", 0.0))))


def _folders(root: Path, depth: int) -> Iterator[Path]:
    """Run and study folders at or below a folder; the runs of a study come with it."""
    if (root / "experiment.toml").exists() or (root / "summary.json").exists():
        yield root
        return
    if (root / "study.toml").exists() and (root / "runs").is_dir():
        yield root
    if depth:
        for child in _children(root):
            yield from _folders(child, depth - 1)


def _children(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def _stamp(folder: Path) -> tuple[float, ...]:
    """When the files of a run or study changed. Raises an OSError where there are none."""
    names = ("experiment.toml", "rounds.jsonl", "summary.json", "study.toml", "results.json")
    return tuple(path.stat().st_mtime if (path := folder / name).exists() else 0.0 for name in names)


def _stamp_of(folder: Path) -> float:
    with suppress(OSError):
        return max(_stamp(folder))
    return 0.0
