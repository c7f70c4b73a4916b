"""What a runtime writes down of a round: bytes of every letter, who took part, who failed and why, what training cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kilter.core import SERVER


@dataclass
class Ledger:
    """One round's books; `close` gives the record and begins the next."""

    sent: Counter[str] = field(default_factory=Counter)  # bytes by node
    received: Counter[str] = field(default_factory=Counter)
    examined: Counter[str] = field(
        default_factory=Counter
    )  # evaluation's traffic, kept apart: {"up": ..., "down": ...}
    participants: dict[str, None] = field(default_factory=dict)  # an ordered set
    failures: list[dict[str, str]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)  # what a step wants on record, by node
    exchanges: int = 0  # pools in which nodes sent something: the rounds of communication a set-up took
    losses: list[tuple[float, int]] = field(default_factory=list)  # (mean loss, steps) of every fit
    fit_seconds: dict[str, float] = field(default_factory=dict)  # seconds of training by step

    def letter(self, sender: str, receiver: str, size: int, training: bool = True) -> None:
        """A letter went from one to the other; what stays at home costs nothing."""
        if sender == receiver or not size:
            return
        if training:
            self.sent[sender] += size
            self.received[receiver] += size
        else:
            self.examined["up"] += size * (sender != SERVER)
            self.examined["down"] += size * (receiver != SERVER)

    def fitted(self, step: str, fits: list[tuple[float, int]], seconds: float) -> None:
        """Training was done in this step: (mean loss, steps) of every fit, and how long they took."""
        self.losses += fits
        if fits:
            self.fit_seconds[step] = self.fit_seconds.get(step, 0.0) + seconds

    def failed(self, node: str, step: str, reason: str) -> None:
        self.failures.append({"node": node, "step": step, "reason": reason})

    def close(self) -> dict[str, Any]:
        """The round's record, and a clean page."""
        up = {k: v for k, v in self.sent.items() if k != SERVER}
        down = {k: v for k, v in self.received.items() if k != SERVER}
        steps = sum(n for _, n in self.losses)
        record = {
            "loss": sum(loss * n for loss, n in self.losses) / steps if steps else None,
            "steps": steps,
            "exchanges": self.exchanges,
            "participants": list(self.participants),
            "failures": self.failures,
            "notes": self.notes,
            "bytes_up": sum(up.values()),
            "bytes_down": sum(down.values()),
            "bytes_by_node": {k: [up.get(k, 0), down.get(k, 0)] for k in sorted(up | down)},
            "evaluation_bytes_up": self.examined["up"],
            "evaluation_bytes_down": self.examined["down"],
            "fit_seconds": self.fit_seconds,
        }
        self.__init__()  # type: ignore[misc]
        return record
