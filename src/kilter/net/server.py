"""The runtime at the server: nodes are sites that hold a stream. `execute` sends the step's name and message and waits.

It waits for whoever was asked until the deadline, and for one whose stream is lost a grace of some seconds to come back, when
it is asked again. A reply counts only if it answers the open order. Fewer replies than the quorum are not taken: then it waits.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kilter.core import SERVER, Mail, Method, Post, Rows, Step, Tree
from kilter.errors import Mistake
from kilter.net.frames import Head, place, text
from kilter.net.links import Link, Links
from kilter.records import wire
from kilter.runtimes.base import Runtime
from kilter.runtimes.step_names import ADOPT, StepKind, StepName
from kilter.runtimes.step_runner import Absent, Done

log = logging.getLogger("kilter.net")

TOOK, BEGAN = "~took", "~began"  # kept with the checkpoint: whose replies were taken; the state that peers begin from
REMARKS = 1000  # most remarks on record in one round, and orders whose late answers are known as such
NOTE = 10_000  # longest note of a site, as JSON


@dataclass
class Call:
    """An order that is open."""

    step: str
    round: int
    seq: int
    bodies: dict[str, bytes]
    until: float
    extra: Head
    answers: dict[str, tuple[Head, bytes]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[str]:
        return [i for i in self.bodies if i not in self.answers]


class Sealed(Mail):
    """Mail that knows which call wrote it."""

    def __init__(self, mail: Mail, written: Head) -> None:
        self._letters = mail._letters
        self.written = written


class Star(Runtime):
    """A federation of sites behind a door; `terms(star, name)` is what a site is told when it comes."""

    def __init__(
        self,
        door: Links,
        sites: Sequence[str],
        *,
        run: str,
        seed: int = 0,
        topology: str = "star",
        bench: Rows | None = None,
        public: Rows | None = None,
        quorum: int | None = None,
        deadline: float = 600.0,
        grace: float = 30.0,
        terms: Callable[[Star, str], Head] | None = None,
    ) -> None:
        torch.set_num_threads(1)  # every fit on one thread: the same numbers as in simulation
        super().__init__(sites, seed, topology, bench, public)
        if self.topology.kind == "rotating":
            raise Mistake(
                "Over a network the server aggregates (star), or every site does (full, ring, ...), not in turn."
            )
        self.run, self.life = run, uuid.uuid4().hex
        self.quorum = len(self.ids) if quorum is None else quorum
        if not 1 <= self.quorum <= len(self.ids):
            raise Mistake(f"The quorum is a number of sites from 1 to {len(self.ids)}, not {self.quorum}.")
        self.deadline, self.grace = deadline, grace
        self._door, self._began = door, time.monotonic()
        self._call: Call | None = None
        self._place = (-1, 0)  # of the last call
        self._since: int | None = None  # the first round of this life
        self._late: deque[tuple[str, tuple[int, int]]] = deque(maxlen=REMARKS)  # orders not answered in time
        self._remarks: list[tuple[str, str, str]] = []
        self._cards: dict[str, Head] = {}  # the sites' public keys for sealed letters
        self._written: Head | None = None  # the call that wrote the mail which is on its way
        self._terms = terms or (lambda star, name: {"run": star.run, "life": star.life})
        with door.changed:
            door.letter, door.arrived = self._letter, self._arrived
            for link in door.links.values():
                self._arrived(link)

    def bind(self, method: Method) -> None:
        super().bind(method)
        self._place, self._since = (-1, 0), None

    # In the door's thread, `changed` held ------------------------------------------------------------------------------

    def _arrived(self, link: Link) -> None:
        """A site is told the terms, and what it was asked when its stream was lost."""
        self._cards[link.name] = link.card
        self._door.send(link.name, {"kind": "terms", **self._terms(self, link.name)}, b"")
        call = self._call
        if call and link.name in call.waiting:
            self._door.send(link.name, self._order(call, link.name), call.bodies[link.name])

    def _letter(self, name: str, head: Head, body: bytes) -> str | None:
        """A letter from a site; a reason if its stream must end."""
        try:
            if head["kind"] == "refusal":
                return f"it does not agree to the terms: {text(head, 'why', 400)}"
            if head["kind"] != "reply":
                return "a letter of an unknown kind"
            if text(head, "from", 64) != name:
                return "it signs with another's name"
            at, call = place(head), self._call
            mine = (head.get("run"), head.get("life")) == (self.run, self.life)
            if (
                mine
                and call
                and at == (call.round, call.seq)
                and head.get("step") == call.step
                and name in call.waiting
            ):
                call.answers[name] = head, body
                self._door.changed.notify_all()
                return None
            if mine and (name, at) in self._late:
                self._late.remove((name, at))
                self._remark(name, text(head, "step", 200), "its reply came after the deadline and was discarded")
                return None
            self._remark(name, text(head, "step", 200), "a reply to no open order was discarded")
            return "a reply to no open order"
        except wire.Malformed as e:
            return str(e)

    def _remark(self, name: str, step: str, what: str) -> None:
        if len(self._remarks) < REMARKS:
            self._remarks.append((name, step, what))
        self._door.note(f"{name}, {step}: {what}")

    def _order(self, call: Call, name: str) -> Head:
        return {
            "kind": "order",
            "run": self.run,
            "life": self.life,
            "since": self._since,
            "round": call.round,
            "seq": call.seq,
            "step": call.step,
            "took": self.states.get(TOOK, {}).get(name),
            **call.extra,
        }

    # In the script's thread ------------------------------------------------------------------------------------------

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        if not messages:
            return {}
        call = self._ask(name, messages)
        said = False
        with self._door.changed:
            while (left := self._patience(call)) > 0:
                if left == math.inf and not said:
                    here = sum(i in self._door.links for i in call.bodies)
                    log.warning("%s waits for a quorum of %d: %d here", name, self.quorum, here)
                    said = True
                self._door.changed.wait(min(left, 1.0))
            self._call = None
            missing = call.waiting
            self._late.extend((i, (call.round, call.seq)) for i in missing)
            away = {i for i in missing if i not in self._door.links}
            for node, step, what in self._remarks:
                self.ledger.failed(node, step, what)
            self._remarks.clear()
        done = {i: _read(head, body) for i, (head, body) in call.answers.items()}
        took = self.states.setdefault(TOOK, {})
        for i in call.answers:
            took[i] = [call.round, call.seq]
        self.changed.add(TOOK)
        for i in missing:
            why = "it is not connected" if i in away else "it did not answer before the deadline"
            done[i] = Done(error=Absent(why))
        return done

    def pool(self, train: Step, combine: Any, state: Tree, to: Any = None, view: Any = None) -> Tree:
        """Replies that pass every check and still cannot be combined (a weight below zero) cost a round, not the run."""
        try:
            return super().pool(train, combine, state, to, view)
        except (ValueError, ArithmeticError, TypeError, LookupError, RuntimeError) as e:
            log.error("round %d, %s failed", self.round, combine.__name__, exc_info=e)
            why = f"the replies cannot be combined ({type(e).__name__}): the state stays as it was"
            self.ledger.failed(self.aggregator, combine.__name__, why)
            return state

    def _ask(self, name: StepName, messages: Mapping[str, Tree]) -> Call:
        """Open a call and send it to those who are here."""
        encoded: dict[int, bytes] = {}  # a broadcast is encoded once
        bodies = {}
        for i, m in messages.items():
            if id(m) not in encoded:
                encoded[id(m)] = wire.encode(m)
            bodies[i] = encoded[id(m)]
        seq = self._place[1] + 1 if self._place[0] == self.round else 1
        self._place = self.round, seq
        if self._since is None:
            self._since = self.round
        extra: Head = {"mail": self._written}
        if self.topology.kind == "peers":
            extra["cards"] = dict(self._cards)
        call = Call(str(name), self.round, seq, bodies, time.monotonic() + self.deadline, extra)
        with self._door.changed:
            self._call = call
            for i, body in bodies.items():
                self._door.send(i, self._order(call, i), body)
        return call

    def deliver(self, posts: Mapping[str, Post], name: StepName) -> Mail:
        """Letters from site to site; one to somebody out of reach is the site's fault, and only its own loss."""
        fine: dict[str, Post] = {}
        for sender, post in posts.items():
            reach = {sender, *(self.topology.neighbours[sender] if self.topology.kind == "peers" else self.ids)}
            fine[sender] = Post({to: letter for to, letter in post.items() if to in reach})
            if len(fine[sender]) < len(post):
                self.ledger.failed(sender, str(name), "it wrote to somebody it has no way to")
        mail = super().deliver(fine, name)
        return Sealed(mail, {"round": self._place[0], "seq": self._place[1], "step": str(name)})

    def call(
        self,
        name: StepName,
        message: Tree = None,
        to: Sequence[str] | None = None,
        training: bool = True,
        alike: bool = True,
    ) -> Any:
        if name.kind is StepKind.SPREAD:
            self._begin_late(self._ordered(to))
        self._written = message.written if isinstance(message, Sealed) else None
        found = super().call(name, message, to, training, alike)
        if name == ADOPT:
            self.states[BEGAN] = {"state": message, "who": dict.fromkeys(found, True)}
            self.changed.add(BEGAN)
        return found

    def _begin_late(self, to: Sequence[str]) -> None:
        """Peers begin alike, also one that was not there when the others did."""
        began = self.states.get(BEGAN)
        late = [i for i in to if i in self._door.links and began and i not in began["who"]]
        if began and late:
            self._written = None
            found = super().call(ADOPT, began["state"], late, training=False)
            began["who"] |= dict.fromkeys(found, True)
            self.changed.add(BEGAN)

    def _patience(self, call: Call) -> float:
        """How many more seconds to wait; 0: no more; infinite: until there is a quorum."""
        now, left = time.monotonic(), 0.0
        for i in call.waiting:
            until = call.until
            if i not in self._door.links:
                until = min(until, self._door.left.get(i, self._began) + self.grace)
            left = max(left, until - now)
        others = sum(i not in call.bodies for i in self._door.links)  # here, but not asked
        if left <= 0 and len(call.answers) + others < min(self.quorum, len(call.bodies) + others):
            return math.inf
        return left

    def wait(self) -> None:
        """Until a quorum is here."""
        with self._door.changed:
            while sum(i in self._door.links for i in self.ids) < self.quorum:
                self._door.changed.wait(1.0)

    def close(self, finished: bool = False) -> None:
        """Sites go home when a run is finished; else they wait for us to come back."""
        self._door.close({"kind": "end"} if finished else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)


def _read(head: Head, body: bytes) -> Done:
    """What a site answered, if it can be understood."""
    try:
        if head.get("error") is not None:
            return Done(error=Absent(text(head, "error", 300)))
        found = wire.decode(body)
        reply, fits, notes, seconds = (found[k] for k in ("reply", "fits", "notes", "seconds"))
        if not all(isinstance(t, str | dict) and len(json.dumps(t)) <= NOTE for t in notes) or len(notes) > 1000:
            raise wire.Malformed("its notes are too long")
        fits = [(float(loss), int(steps)) for loss, steps in fits]
        if not all(math.isfinite(loss) and 0 <= steps < 2**40 for loss, steps in fits):
            fits = []
        if head.get("post"):
            if not isinstance(reply, dict):
                raise wire.Malformed("its letters are not letters")
            reply = Post(reply)
        return Done(reply, None, fits, float(seconds), list(notes))
    except (wire.Malformed, LookupError, TypeError, ValueError, OverflowError) as e:
        why = str(e) if isinstance(e, wire.Malformed) else "it is not as it should be"
        return Done(error=Absent(f"its reply cannot be read: {why}"))


RESERVED = (SERVER, TOOK, BEGAN)
