"""The messages of a rotating federation, as types: which site leads which round, and how the role moves on.

A turn is (round, attempt): an attempt above 0 means that an earlier leader of this round was lost. Turns are ordered. A site
follows the highest turn it knows of and refuses orders of lower ones, so two sites never lead the same members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kilter.net.fields import Fields
from kilter.net.frames import Head
from kilter.net.messages import MOST_ROWS, Card
from kilter.net.names import check_name
from kilter.records.wire import Malformed

MOST_ATTEMPTS = 10**6


class Turn(NamedTuple):
    """Who leads: the round, and the attempt at it."""

    round: int
    attempt: int

    @staticmethod
    def parse(value: object) -> Turn:
        if not isinstance(value, list) or len(value) != 2:
            raise Malformed("a turn is not a round and an attempt")
        fields = Fields({"round": value[0], "attempt": value[1]}, "turn")
        return Turn(fields.integer("round"), fields.integer("attempt", 0, MOST_ATTEMPTS))


NOBODY = Turn(0, 0)  # nobody has led a round


@dataclass(frozen=True)
class Waits:
    """How long the sites of a run wait for each other."""

    quorum: int = 0  # fewest sites to begin and to go on with; 0: all to begin, half of them to go on
    deadline: float = 600.0
    grace: float = 30.0


@dataclass(frozen=True)
class Ready:
    """A site takes part: what the others must know to write to it."""

    name: str
    nonce: str  # of this process: a packet for an earlier process of this site cannot be opened
    rows: int
    instance: str  # of its state directory
    card: Card
    turn: Turn = NOBODY  # the highest turn it knows of
    aggregates: bool = True  # whether its policy lets it aggregate

    def head(self) -> Head:
        return {
            "kind": "ready",
            "name": self.name,
            "nonce": self.nonce,
            "rows": self.rows,
            "instance": self.instance,
            "card": self.card.plain(),
            "turn": list(self.turn),
            "aggregates": self.aggregates,
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Ready:
        fields = Fields(head, "ready")
        return Ready(
            fields.name("name"),
            fields.identifier("nonce"),
            fields.integer("rows", 1, MOST_ROWS),
            fields.identifier("instance"),
            Card.parse(head.get("card")),
            Turn.parse(head.get("turn")),
            fields.flag("aggregates"),
        )


@dataclass(frozen=True)
class Presence:
    """The relay tells who is connected, and how long to wait for whom."""

    sites: dict[
        str, tuple[Ready, int]
    ]  # with the number of the connection: a new number means that packets may be lost
    quorum: int
    deadline: float
    grace: float

    def head(self) -> Head:
        return {
            "kind": "presence",
            "sites": {name: {**ready.head(), "connection": number} for name, (ready, number) in self.sites.items()},
            "quorum": self.quorum,
            "deadline": self.deadline,
            "grace": self.grace,
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Presence:
        fields = Fields(head, "presence")
        sites: dict[str, tuple[Ready, int]] = {}
        for name, entry in fields.table("sites").items():
            if not isinstance(entry, dict):
                raise Malformed("presence: an entry is not a table")
            ready = Ready.parse(entry)
            if ready.name != check_name(name):
                raise Malformed("presence: an entry has another site's name")
            sites[name] = ready, Fields(entry, "presence").integer("connection")
        return Presence(sites, fields.integer("quorum"), _seconds(head, "deadline"), _seconds(head, "grace"))


def _seconds(head: Mapping[str, object], key: str) -> float:
    value = head.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise Malformed(f"presence: {key} is not a number of seconds")
    return float(value)


@dataclass(frozen=True)
class Packet:
    """The outside of a sealed packet: all that a relay can read."""

    run: str
    sender: str
    to: str
    nonce: str  # of the sender's process
    number: int  # counts that process's packets: an old one is not opened again

    def head(self) -> Head:
        head: Head = {"kind": "packet", "run": self.run, "from": self.sender, "to": self.to}
        return head | {"nonce": self.nonce, "number": self.number}

    @staticmethod
    def parse(head: Mapping[str, object]) -> Packet:
        fields = Fields(head, "packet")
        nonce, number = fields.identifier("nonce"), fields.integer("number")
        return Packet(fields.identifier("run"), fields.name("from"), fields.name("to"), nonce, number)


TurnKind = Literal[
    "books",  # the run's records so far, and the last replies that counted: comes before a hand-over
    "hand-over",  # state, aggregator's memory, best model so far: the receiver leads this turn
    "taken",  # the receiver has stored the hand-over
    "leading",  # the leader makes progress: a leader without progress is given up after the deadline
    "finished",  # the leader has finished its round and asks to be released from the one who appointed it
    "released",  # the one who appointed it agrees: it has appointed no successor
    "stale",  # an order of a lower turn is refused; `turn` is the highest known
    "record",  # without a relay: the record of a round, for every site's run folder
    "records",  # at the end: all of them, because single ones may have been lost
    "result",  # without a relay: the run's summary
    "over",  # the run is finished
]
TURN_KINDS: tuple[TurnKind, ...] = get_args(TurnKind)


@dataclass(frozen=True)
class TurnMessage:
    """A message about turns, inside a packet."""

    kind: TurnKind
    turn: Turn
    sizes: tuple[int, ...] = ()  # hand-over: bytes of state, memory and best model in the body

    def head(self) -> Head:
        return {"kind": self.kind, "turn": list(self.turn), "sizes": list(self.sizes)}

    @staticmethod
    def parse(head: Mapping[str, object]) -> TurnMessage:
        fields = Fields(head, "a message about turns")
        kind = fields.text("kind", 20)
        if kind not in TURN_KINDS:
            raise Malformed("a message about turns of an unknown kind")
        sizes = head.get("sizes", [])
        if not isinstance(sizes, list) or len(sizes) > 3:
            raise Malformed("a hand-over with other parts than state, memory and best model")
        parts = tuple(Fields({"size": size}, "hand-over").integer("size") for size in sizes)
        return TurnMessage(kind, Turn.parse(head.get("turn")), parts)
