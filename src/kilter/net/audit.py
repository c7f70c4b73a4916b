"""The audit log of a site: one line for everything that left it, each line bound to the one before by a hash.

A line holds time, run, round, step, kind, bytes, digest of the bytes, recipient, and the digest of the approved terms. `hash` is
the BLAKE2b of the line without it, and `previous` the hash of the line before, so a changed, removed or inserted line is noticed.
Lines cut off at the end are not: note the last hash (`kilter audit` prints it) somewhere else to notice that, too.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from kilter.errors import Mistake
from kilter.net.names import printable

FILE = "audit.jsonl"
START = "0" * 32  # the hash before the first line


@dataclass(frozen=True)
class AuditEntry:
    """One thing that left the site, or a decision about what may leave."""

    number: int
    time: str
    event: str  # hello, reply, letter, hand-over, refusal, approval
    run: str
    round: int
    step: str
    kinds: str  # what it discloses, for example "counts model"
    bytes: int
    digest: str  # BLAKE2b of the bytes
    to: str
    approval: str  # digest of the approved terms
    previous: str
    hash: str = ""

    def sealed(self) -> AuditEntry:
        """With its hash."""
        return AuditEntry(**{**asdict(self), "hash": self.expected_hash()})

    def expected_hash(self) -> str:
        plain = {key: value for key, value in asdict(self).items() if key != "hash"}
        return blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


class AuditLog:
    """The log in a state directory. Every entry is on disk before what it describes is sent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self._writing = folder / FILE, threading.Lock()
        self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Mistake(f"Another process writes to '{self.path}': give each site its own --state-dir.") from None
        self._cut_torn_line()
        self.number, self.hash = 0, START
        for entry in verify(self.path):
            self.number, self.hash = entry.number, entry.hash

    def _cut_torn_line(self) -> None:
        """A crash may leave half a line; what it describes was not sent."""
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            self._file.truncate(data.rfind(b"\n") + 1)

    def record(
        self,
        event: str,
        body: bytes = b"",
        *,
        run: str = "",
        round: int = 0,
        step: str = "",
        kinds: str = "",
        to: str = "",
        approval: str = "",
    ) -> AuditEntry:
        """Append an entry."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        digest = blake2b(body, digest_size=16).hexdigest() if body else ""
        with self._writing:
            entry = AuditEntry(
                self.number + 1, now, event, run, round, step, kinds, len(body), digest, to, approval, self.hash
            ).sealed()
            self._file.write(json.dumps(asdict(entry)) + "\n")
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self.number, self.hash = entry.number, entry.hash
        return entry

    def close(self) -> None:
        self._file.close()


def verify(path: Path) -> Iterator[AuditEntry]:
    """The entries of a log, each checked; a Mistake names the first line that does not fit."""
    previous, number = START, 0
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise Mistake(f"'{path}' cannot be read: {getattr(e, 'strerror', None) or 'it is not text'}.") from None
    names = {f.name for f in fields(AuditEntry)}
    for at, line in enumerate(lines, start=1):
        try:
            plain = json.loads(line)
            entry = AuditEntry(**plain) if set(plain) == names else None
        except (ValueError, TypeError):
            entry = None
        if (
            entry is None
            or (entry.number, entry.previous) != (number + 1, previous)
            or entry.hash != entry.expected_hash()
        ):
            raise Mistake(
                f"Line {at} of '{path}' was changed, removed or inserted: the audit log is not genuine from there on."
            )
        number, previous = entry.number, entry.hash
        yield entry


def summarise(path: Path) -> list[str]:
    """What left the site, by run, recipient and kind, in plain words."""
    totals: Counter[tuple[str, str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str, str]] = Counter()
    last = START
    first_time = last_time = ""
    for entry in verify(path):
        key = (entry.run[:8] or "-", entry.event, entry.kinds or "-", entry.to or "-")
        totals[key] += 1
        sizes[key] += entry.bytes
        first_time, last_time, last = first_time or entry.time, entry.time, entry.hash
    lines = [f"{sum(totals.values())} entries, all genuine" + (f", {first_time} to {last_time}" if first_time else "")]
    for (run, event, kinds, to), count in sorted(totals.items()):
        size = sizes[run, event, kinds, to]
        lines.append(printable(f"run {run}: {count} x {event} to {to}: {kinds}, {size} bytes"))
    return [*lines, f"last hash: {last}"]


def export(path: Path, out: Path) -> int:
    """Write the verified entries as CSV; how many."""
    entries = list(verify(path))
    with open(out, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow([field.name for field in fields(AuditEntry)])
        writer.writerows(list(asdict(entry).values()) for entry in entries)
    return len(entries)
