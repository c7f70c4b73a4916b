"""Which terms a site has approved, by digest. Terms whose digest is not in the list need a new approval, at any time."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from kilter.errors import Mistake
from kilter.records.files import write

FILE, PENDING = "approvals.jsonl", "pending"
DIGEST = re.compile(r"[0-9a-f]{32}")


class NotApproved(Mistake):
    """The terms of a run have not been approved at this site."""

    def __init__(self, digest: str) -> None:
        super().__init__(
            f"The terms {digest} are not approved at this site: look at them (kilter join ... --dry-run), "
            f"then approve them (kilter approve {digest} --state-dir ...) and join again."
        )


class Approvals:
    """The approvals in a state directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def has(self, digest: str) -> bool:
        return any(entry.get("digest") == digest for entry in self.entries())

    def entries(self) -> list[dict[str, str]]:
        """Every approval, oldest first."""
        if not self.path.exists():
            return []
        try:
            entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        except (OSError, ValueError):
            raise Mistake(f"'{self.path}' is damaged: remove it and approve the terms again.") from None
        return [entry for entry in entries if isinstance(entry, dict)]

    def explain_pending(self, lines: list[str]) -> bool:
        """Write terms in plain words to pending/DIGEST.txt, for a person to read; nobody approves them now."""
        digest = DIGEST.findall(lines[-1])[-1]
        folder = self.path.parent / PENDING
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(folder / f"{digest}.txt", "\n".join(lines) + "\n")
        return False

    def pending(self) -> list[str]:
        """Digests of terms that wait for an approval."""
        listed = {path.stem for path in (self.path.parent / PENDING).glob("*.txt")}
        return sorted(listed - {entry.get("digest", "") for entry in self.entries()})

    def add(self, digest: str, how: str) -> None:
        """Approve these terms; `how` says by whom or what."""
        if not DIGEST.fullmatch(digest):
            raise Mistake(f"'{digest[:64]}' is not a digest of terms: copy the 32 characters that --dry-run prints.")
        if self.has(digest):
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = {"digest": digest, "how": how, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as f:
            f.write(json.dumps(entry) + "\n")
            f.flush()
            os.fsync(f.fileno())
