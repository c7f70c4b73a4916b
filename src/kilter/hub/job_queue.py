"""The queue: one SQLite file in WAL mode. Every change of a job's state is one transaction that names the states it may leave.

So a crash leaves a job in the state before or after a change, and two processes cannot both make it: the hub and the drivers of
studies write to the same file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from kilter.errors import Mistake
from kilter.hub.messages import State

VERSION = 1
ACTIVE: tuple[State, ...] = ("queued", "waiting", "running")
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL CHECK (kind IN ('experiment', 'study', 'run')),
    parent INTEGER NOT NULL DEFAULT 0,      -- the study of a run
    key TEXT NOT NULL DEFAULT '',           -- the folder of a run in its study
    name TEXT NOT NULL,
    owner TEXT NOT NULL,
    spec TEXT NOT NULL,                     -- the TOML file
    options TEXT NOT NULL,                  -- JSON
    sites TEXT NOT NULL,                    -- JSON
    quorum INTEGER NOT NULL,
    rounds INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL CHECK (state IN ('queued', 'waiting', 'running', 'finished', 'failed', 'cancelled')),
    reason TEXT NOT NULL DEFAULT '',
    attempts INTEGER NOT NULL DEFAULT 0,    -- crashes of its process since it last progressed
    submitted TEXT NOT NULL,
    started TEXT NOT NULL DEFAULT '',
    ended TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS by_state ON jobs (state);
CREATE INDEX IF NOT EXISTS by_parent ON jobs (parent);
CREATE UNIQUE INDEX IF NOT EXISTS run_of_study ON jobs (parent, key) WHERE kind = 'run';
CREATE TABLE IF NOT EXISTS changes (
    job INTEGER NOT NULL, time TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL
);
"""
Kind = Literal["experiment", "study", "run"]


@dataclass(frozen=True)
class RunOptions:
    """What `kilter serve` needs besides the experiment."""

    data: str = "none"  # name of the hub's data
    deadline: float = 600.0
    grace: float = 30.0
    preset: str = ""


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue has it."""

    id: int
    kind: Kind
    parent: int
    key: str
    name: str
    owner: str
    spec: str
    options: RunOptions
    sites: tuple[str, ...]
    quorum: int
    rounds: int
    state: State
    reason: str
    attempts: int
    submitted: str
    started: str
    ended: str

    @property
    def need(self) -> int:
        """Fewest sites to begin with."""
        return self.quorum or len(self.sites)


def timestamp(moment: datetime) -> str:
    """A moment in UTC as text that sorts by time."""
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def now() -> str:
    return timestamp(datetime.now(UTC))


class JobQueue:
    """The jobs of a hub."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._create()
        except (sqlite3.Error, OSError) as e:
            raise Mistake(f"The queue '{path}' cannot be used: {e}.") from None
        self._db.row_factory = sqlite3.Row

    def _create(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise Mistake(f"The queue '{self.path}' was written by a newer release of kilter: update this hub.")
        self._db.executescript(SCHEMA)
        self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # Changes --------------------------------------------------------------------------------------------------------

    def add(
        self,
        kind: Kind,
        name: str,
        owner: str,
        spec: str,
        sites: Sequence[str],
        quorum: int = 0,
        options: RunOptions | None = None,
        *,
        rounds: int = 0,
        parent: int = 0,
        key: str = "",
    ) -> int:
        """Queue a job; its number. A run of a study that is queued already keeps its number."""
        with self._transaction() as db:
            if kind == "run":
                row = db.execute("SELECT id FROM jobs WHERE parent = ? AND key = ?", (parent, key)).fetchone()
                if row is not None:
                    return int(row["id"])
            plain = json.dumps(vars(options or RunOptions()))
            values = (kind, parent, key, name, owner, spec, plain, json.dumps(list(sites)), quorum, rounds, now())
            cursor = db.execute(
                "INSERT INTO jobs (kind, parent, key, name, owner, spec, options, sites, quorum, rounds, submitted, state)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued')",
                values,
            )
            job = int(cursor.lastrowid or 0)
            db.execute("INSERT INTO changes VALUES (?, ?, 'queued', '')", (job, now()))
        return job

    def move(self, job: int, to: State, reason: str = "", leaving: Iterable[State] = ACTIVE) -> bool:
        """Change a job's state, if it is in one of the states to leave; whether it was."""
        states = tuple(leaving)
        moment = now()
        sets = "state = ?, reason = ?"
        values: list[object] = [to, reason]
        if to == "running":
            sets += ", started = CASE started WHEN '' THEN ? ELSE started END"
            values.append(moment)
        elif to not in ACTIVE:
            sets += ", ended = ?"
            values.append(moment)
        with self._transaction() as db:
            before = db.execute("SELECT state, reason FROM jobs WHERE id = ?", (job,)).fetchone()
            if before is None or before["state"] not in states:
                return False
            if (before["state"], before["reason"]) == (to, reason):
                return True
            db.execute(f"UPDATE jobs SET {sets} WHERE id = ?", (*values, job))
            db.execute("INSERT INTO changes VALUES (?, ?, ?, ?)", (job, moment, to, reason))
        return True

    def cancel(self, job: int, reason: str) -> list[int]:
        """Cancel a job and, of a study, its runs; the jobs that were active."""
        family = [job, *(j.id for j in self.runs_of(job))]
        return [each for each in family if self.move(each, "cancelled", reason)]

    def crashed(self, job: int, progressed: bool = False) -> int:
        """Count a crash of a job's process; how many there were since it last progressed."""
        with self._transaction() as db:
            before = "0" if progressed else "attempts"
            db.execute(f"UPDATE jobs SET attempts = {before} + 1 WHERE id = ?", (job,))
            return int(db.execute("SELECT attempts FROM jobs WHERE id = ?", (job,)).fetchone()[0])

    # Reading --------------------------------------------------------------------------------------------------------

    def get(self, job: int) -> QueuedJob | None:
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone()
        return None if row is None else _job(row)

    def active(self) -> list[QueuedJob]:
        """Jobs that are not over, oldest first."""
        return [_job(r) for r in self._db.execute("SELECT * FROM jobs WHERE state IN (?, ?, ?) ORDER BY id", ACTIVE)]

    def active_of(self, owner: str) -> int:
        """How many jobs of a submitter are not over."""
        query = "SELECT COUNT(*) FROM jobs WHERE owner = ? AND kind != 'run' AND state IN (?, ?, ?)"
        return int(self._db.execute(query, (owner, *ACTIVE)).fetchone()[0])

    def runs_of(self, study: int) -> list[QueuedJob]:
        return [_job(r) for r in self._db.execute("SELECT * FROM jobs WHERE parent = ? ORDER BY id", (study,))]

    def states_of(self, study: int) -> list[State]:
        """The states of a study's runs."""
        return [row[0] for row in self._db.execute("SELECT state FROM jobs WHERE parent = ?", (study,))]

    def newest(self, most: int, owner: str = "") -> list[QueuedJob]:
        """Jobs that were submitted, newest first; runs of studies only while they are active."""
        query = "SELECT * FROM jobs WHERE (kind != 'run' OR state IN (?, ?, ?))"
        values: tuple[object, ...] = ACTIVE
        if owner:
            query, values = f"{query} AND owner = ?", (*values, owner)
        return [_job(r) for r in self._db.execute(f"{query} ORDER BY id DESC LIMIT ?", (*values, most))]

    def finished_runs(self, most: int) -> list[QueuedJob]:
        """Runs that are finished, newest first; not studies."""
        query = "SELECT * FROM jobs WHERE state = 'finished' AND kind != 'study' ORDER BY id DESC LIMIT ?"
        return [_job(r) for r in self._db.execute(query, (most,))]

    def counts(self) -> Mapping[State, int]:
        """How many jobs are in each state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state").fetchall())

    def history(self, job: int) -> list[tuple[str, str, str]]:
        """Every change of a job: time, state, reason."""
        rows = self._db.execute("SELECT time, state, reason FROM changes WHERE job = ? ORDER BY rowid", (job,))
        return [(r["time"], r["state"], r["reason"]) for r in rows]


def _job(row: sqlite3.Row) -> QueuedJob:
    values = dict(row)
    values["options"] = RunOptions(**json.loads(values["options"]))
    values["sites"] = tuple(json.loads(values["sites"]))
    return QueuedJob(**values)
