"""Everything that servers, sites and peers send each other, as types. Nothing that arrived is used before it is parsed here.

Each message is a frozen dataclass with `head()`, the JSON object that travels, and `parse(head)`, which checks every field:
its type, the size of numbers, the length of text and lists. A message that does not fit raises `Malformed`: the sender's failure.
The bodies that the framework itself reads are checked in `kilter.net.results`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kilter.net.data_description import DataDescription
from kilter.net.fields import Fields, Place, check_name, printable
from kilter.net.frames import Head
from kilter.net.tracing import checked_parent
from kilter.net.versions import PROTOCOLS, common_protocol, read_range
from kilter.records.wire import Malformed
from kilter.runtimes.step_names import StepName

MOST_ROWS = 10**10  # rows that a site may announce


def kind_of(head: Mapping[str, object]) -> str:
    """The kind of a message: hello, terms, order, reply, refusal, goodbye, letter."""
    return Fields(head, "a letter's head").text("kind", 20)


def _expect(head: Mapping[str, object], kind: str) -> Fields:
    if kind_of(head) != kind:
        raise Malformed(f"a message of another kind than expected ({kind})")
    return Fields(head, kind)


# Server and site --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A site's public key for sealed letters, and the proof that it is this site's."""

    public: str
    cert: str = ""
    signature: str = ""

    def plain(self) -> dict[str, str]:
        return {"public": self.public, "cert": self.cert, "signature": self.signature}

    @staticmethod
    def parse(value: object) -> Card:
        if not isinstance(value, dict) or not all(isinstance(v, str) and len(v) <= 20_000 for v in value.values()):
            raise Malformed("a card is not a table of texts")
        return Card(str(value.get("public", "")), str(value.get("cert", "")), str(value.get("signature", "")))


@dataclass(frozen=True)
class StateMark:
    """Which state directory a site uses, and how often its state was changed in this run."""

    instance: str = ""
    generation: int = 0

    def plain(self) -> dict[str, object]:
        return {"instance": self.instance, "generation": self.generation}

    @staticmethod
    def parse(value: object) -> StateMark:
        if not isinstance(value, dict):
            raise Malformed("a state mark is not a table")
        fields = Fields(value, "state mark")
        return StateMark(fields.identifier("instance"), fields.integer("generation"))


@dataclass(frozen=True)
class Hello:
    """A site introduces itself."""

    name: str
    description: DataDescription
    rows: int  # training, validation and test rows together; replies that claim more are refused
    instance: str  # of its state directory
    card: Card
    purpose: Literal["join", "dry-run"] = "join"
    protocols: tuple[int, int] = PROTOCOLS  # oldest and newest that it speaks

    @property
    def protocol(self) -> int:
        """The newest protocol that both sides speak."""
        return common_protocol(self.protocols)

    def head(self) -> Head:
        return {
            "kind": "hello",
            "protocol": self.protocols[0],  # all that a release before ranges looks at
            "protocols": list(self.protocols),
            "name": self.name,
            "data": self.description.plain(),
            "rows": self.rows,
            "instance": self.instance,
            "card": self.card.plain(),
            "purpose": self.purpose,
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Hello:
        fields = _expect(head, "hello")
        protocols = read_range(head)
        common_protocol(protocols)
        purpose = fields.text("purpose", 20)
        if purpose not in ("join", "dry-run"):
            raise fields.bad("purpose", "join or dry-run")
        return Hello(
            fields.name("name"),
            DataDescription.parse(head.get("data")),
            fields.integer("rows", 1, MOST_ROWS),
            fields.identifier("instance"),
            Card.parse(head.get("card")),
            "join" if purpose == "join" else "dry-run",
            protocols,
        )


@dataclass(frozen=True)
class Refusal:
    """One side does not take part, and says why. `later`: ask again, the answer may change."""

    why: str
    later: bool = False

    def head(self) -> Head:
        return {"kind": "refusal", "why": printable(self.why), "later": self.later}

    @staticmethod
    def parse(head: Mapping[str, object]) -> Refusal:
        fields = _expect(head, "refusal")
        return Refusal(fields.text("why", 400), fields.flag("later"))


@dataclass(frozen=True)
class Goodbye:
    """The server stops: the run is finished, or it was interrupted and may come back."""

    finished: bool
    why: str = ""

    def head(self) -> Head:
        return {"kind": "goodbye", "finished": self.finished, "why": printable(self.why)}

    @staticmethod
    def parse(head: Mapping[str, object]) -> Goodbye:
        fields = _expect(head, "goodbye")
        return Goodbye(fields.flag("finished"), fields.text("why", 400, optional=True))


@dataclass(frozen=True)
class MailMark:
    """The call whose letters an order delivers."""

    round: int
    seq: int
    step: StepName

    def plain(self) -> Head:
        return {"round": self.round, "seq": self.seq, "step": str(self.step)}

    @staticmethod
    def parse(value: object) -> MailMark:
        if not isinstance(value, dict):
            raise Malformed("the mark of a mail is not a table")
        fields = Fields(value, "mail")
        return MailMark(*fields.place(), fields.step())


@dataclass(frozen=True)
class Order:
    """The server asks a site to run a step."""

    run: str
    session: str  # new each time the server starts
    session_round: int  # the first round of this session
    round: int
    seq: int
    step: StepName
    accepted: Place | None = None  # the last reply of this site that counted
    state: StateMark | None = None  # the site's state after that reply
    mail: MailMark | None = None
    cards: dict[str, Card] = field(default_factory=dict)
    trace: str = ""  # the call's place in a trace (W3C traceparent); empty: nothing is traced

    @property
    def place(self) -> Place:
        return self.round, self.seq

    def head(self) -> Head:
        return {
            "kind": "order",
            "run": self.run,
            "session": self.session,
            "session_round": self.session_round,
            "round": self.round,
            "seq": self.seq,
            "step": str(self.step),
            "accepted": None if self.accepted is None else list(self.accepted),
            "state": None if self.state is None else self.state.plain(),
            "mail": None if self.mail is None else self.mail.plain(),
            "cards": {name: card.plain() for name, card in self.cards.items()},
            **({"trace": self.trace} if self.trace else {}),
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Order:
        fields = _expect(head, "order")
        state, mail = head.get("state"), head.get("mail")
        return Order(
            fields.identifier("run"),
            fields.identifier("session"),
            fields.integer("session_round"),
            *fields.place(),
            fields.step(),
            fields.optional_place("accepted"),
            None if state is None else StateMark.parse(state),
            None if mail is None else MailMark.parse(mail),
            {check_name(name): Card.parse(card) for name, card in fields.table("cards").items()},
            checked_parent(fields.text("trace", 64, optional=True)),
        )


@dataclass(frozen=True)
class Reply:
    """A site answers an order; the body is a `StepResult`, or empty if the step failed."""

    sender: str
    run: str
    session: str
    round: int
    seq: int
    step: StepName
    state: StateMark
    letters: bool = False  # the reply consists of letters to other sites
    error: str = ""

    @property
    def place(self) -> Place:
        return self.round, self.seq

    def head(self) -> Head:
        return {
            "kind": "reply",
            "from": self.sender,
            "run": self.run,
            "session": self.session,
            "round": self.round,
            "seq": self.seq,
            "step": str(self.step),
            "state": self.state.plain(),
            "letters": self.letters,
            "error": self.error,
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Reply:
        fields = _expect(head, "reply")
        return Reply(
            fields.name("from"),
            fields.identifier("run"),
            fields.identifier("session"),
            *fields.place(),
            fields.step(),
            StateMark.parse(head.get("state")),
            fields.flag("letters"),
            fields.text("error", 300, optional=True),
        )


# Peers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerLetter:
    """One peer writes to another; the body is a tree, or nothing (`empty`)."""

    run: str
    sender: str
    to: str
    round: int
    seq: int
    step: StepName
    empty: bool = False
    gave_up: tuple[str, ...] = ()  # peers that the sender no longer waits for

    @property
    def place(self) -> Place:
        return self.round, self.seq

    def head(self) -> Head:
        return {
            "kind": "letter",
            "run": self.run,
            "from": self.sender,
            "to": self.to,
            "round": self.round,
            "seq": self.seq,
            "step": str(self.step),
            "empty": self.empty,
            "gave_up": list(self.gave_up),
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> PeerLetter:
        fields = _expect(head, "letter")
        return PeerLetter(
            fields.text("run", 64),
            fields.name("from"),
            fields.name("to"),
            *fields.place(),
            fields.step(),
            fields.flag("empty"),
            fields.names("gave_up"),
        )


@dataclass(frozen=True)
class PeerHello:
    """A peer is there, and says from which round on it needs letters again."""

    run: str
    sender: str
    to: str
    round: int

    def head(self) -> Head:
        fields: Head = {"kind": "hello", "run": self.run, "from": self.sender, "to": self.to, "round": self.round}
        return {**fields, "protocol": PROTOCOLS[0], "protocols": list(PROTOCOLS)}

    @staticmethod
    def parse(head: Mapping[str, object]) -> PeerHello:
        fields = _expect(head, "hello")
        if "protocol" in head:  # releases before ranges do not say
            common_protocol(read_range(head), "peer")
        return PeerHello(fields.text("run", 64), fields.name("from"), fields.name("to"), fields.integer("round"))


@dataclass(frozen=True)
class PeerAnswer:
    """What a peer answers to a letter or a hello: where it is, and whether it had given the other one up."""

    round: int
    gave_up: bool

    def head(self) -> Head:
        return {"kind": "answer", "round": self.round, "gave_up": self.gave_up}

    @staticmethod
    def parse(head: Mapping[str, object]) -> PeerAnswer:
        fields = _expect(head, "answer")
        return PeerAnswer(fields.integer("round"), fields.flag("gave_up"))
