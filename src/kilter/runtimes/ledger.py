"""What a runtime books during a round: the bytes of every letter, who took part, who failed and why, what training cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kilter.core import SERVER, Node, Note
from kilter.records.types import Exhibit, Failure, FailureKind, NodeNote, NodeNotice, Point, Traffic

LETTER_REFUSED = "a letter of another node was refused"
NOT_FINITE = "the training loss was not a finite number"


@dataclass
class Ledger:
    """The books of one round. `close` gives the round's record and starts the next."""

    sent: Counter[str] = field(default_factory=Counter)  # bytes by node
    received: Counter[str] = field(default_factory=Counter)
    evaluation: Counter[str] = field(default_factory=Counter)  # bytes of evaluation: "up", "down"
    participants: dict[str, None] = field(default_factory=dict)  # an ordered set
    failures: list[Failure] = field(default_factory=list)
    notes: list[NodeNote] = field(default_factory=list)
    notices: list[NodeNotice] = field(default_factory=list)
    series: list[Point] = field(default_factory=list)
    listens: dict[str, dict[str, float]] = field(default_factory=dict)
    exhibits: list[Exhibit] = field(default_factory=list)
    exchanges: int = 0  # pools in which nodes sent something
    replies: int = 0  # accepted replies of training steps that carry something
    losses: list[tuple[float, int]] = field(default_factory=list)  # (mean loss, steps) of every fit
    fit_seconds: dict[str, float] = field(default_factory=dict)  # seconds of training by step
    proxy: str = ""  # the node through which all letters go; empty: they go straight to their receiver

    def letter(self, sender: str, receiver: str, size: int, training: bool = True) -> None:
        """Book a letter. A letter to oneself costs nothing."""
        if sender == receiver or not size:
            return
        if self.proxy and self.proxy not in (sender, receiver):
            self.letter(sender, self.proxy, size, training)
            sender = self.proxy
        if training:
            self.sent[sender] += size
            self.received[receiver] += size
        else:
            self.evaluation["up"] += size * (sender != SERVER)
            self.evaluation["down"] += size * (receiver != SERVER)

    def include(self, other: Ledger) -> None:
        """Book the letters, failures and notices of other books, too."""
        self.sent.update(other.sent)
        self.received.update(other.received)
        self.failures += other.failures
        self.notices += other.notices

    def fitted(self, step: str, fits: list[tuple[float, int]], seconds: float) -> None:
        """Book the fits of a step: (mean loss, steps) of each, and the seconds they took."""
        self.losses += fits
        if fits:
            self.fit_seconds[step] = self.fit_seconds.get(step, 0.0) + seconds

    def failed(self, node: str, step: str, reason: str, kind: FailureKind = "absent") -> None:
        """Book a reply that did not come or was refused."""
        self.failures.append(Failure(node, step, reason, kind))

    def note(self, node: str, step: str, note: Note) -> None:
        """Book what a step wrote with `Node.note`, `notice`, `record` or `listened`."""
        match note:
            case str():
                self.notes.append(NodeNote(node, step, note))
            case {"notice": str(what)}:
                self.notice(node, step, what)
            case {"series": str(name), "value": int() | float() as value, "at": int(at)} if math.isfinite(value):
                self.series.append(Point(name, node, at, float(value)))
            case {"series": str(name)}:
                self.notice(node, step, f"a value of '{name}' was not a finite number")
            case {"listens": Mapping() as weights} if all(map(_is_weight, weights.items())):
                self.listens[node] = {str(peer): float(weight) for peer, weight in weights.items()}
            case {"exhibit": Exhibit() as exhibit}:  # made in this program; no message can carry one
                self.exhibits.append(exhibit)
            case _:
                self.notice(node, step, "a note could not be read")

    def notice(self, node: str, step: str, what: str) -> None:
        """Book that something did not happen as intended."""
        self.notices.append(NodeNotice(node, step, what))

    def refused_letter(self, node: str, step: str, why: str) -> None:
        """Book that a node refused a letter of another."""
        self.notes.append(NodeNote(node, step, why))
        self.notice(node, step, LETTER_REFUSED)

    def close(self) -> Traffic:
        """The round's record; the ledger starts anew."""
        up = {k: v for k, v in self.sent.items() if k != SERVER}
        down = {k: v for k, v in self.received.items() if k != SERVER}
        steps = sum(n for _, n in self.losses)
        loss = sum(loss * n for loss, n in self.losses) / steps if steps else None
        if loss is not None and not math.isfinite(loss):
            loss = None
            self.notice(SERVER, "", NOT_FINITE)
        record = Traffic(
            loss=loss,
            steps=steps,
            exchanges=self.exchanges,
            replies=self.replies,
            participants=list(self.participants),
            failures=self.failures,
            notes=self.notes,
            notices=self.notices,
            series=self.series,
            listens=self.listens,
            exhibits=self.exhibits,
            bytes_up=sum(up.values()),
            bytes_down=sum(down.values()),
            bytes_by_node={k: (up.get(k, 0), down.get(k, 0)) for k in sorted(up | down)},
            evaluation_bytes_up=self.evaluation["up"],
            evaluation_bytes_down=self.evaluation["down"],
            fit_seconds=self.fit_seconds,
        )
        vars(self).update(vars(Ledger(proxy=self.proxy)))
        return record


def refuse_letter(node: Node, why: str) -> None:
    """Write into a node's notes that it refused a letter of another."""
    node.note(why)
    node.notice(LETTER_REFUSED)


def _is_weight(item: tuple[object, object]) -> bool:
    peer, weight = item
    return isinstance(peer, str) and isinstance(weight, int | float) and math.isfinite(weight)
