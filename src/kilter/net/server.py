"""The runtime at the server: nodes are sites that hold a stream. `execute` sends a step's name and message, and waits.

It waits for every site it asked until the deadline, and gives a site that lost its connection some seconds to come back; then it
asks again. A reply counts only if it answers the open order. With fewer replies than the quorum, the run waits.
Whatever a site sends is parsed and checked here; what does not fit is that site's failure and nobody else's.
"""

from __future__ import annotations

import logging
import math
import mmap
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from kilter.core import AtNodes, Mail, Method, Params, Post, Rows, Step, Tree, Unread
from kilter.data import Schema
from kilter.data.preparation import AnyPreparation, check_statistics
from kilter.errors import Mistake
from kilter.net.fields import RESERVED, Place
from kilter.net.frames import Body, Head
from kilter.net.messages import Card, Goodbye, Hello, MailMark, Order, Refusal, Reply, StateMark, kind_of
from kilter.net.results import StepResult, check_counts, check_report, read_again, writes_letters
from kilter.net.tracing import RoundTraces
from kilter.net.transport import ConnectedSite, Transport
from kilter.records import wire
from kilter.runtimes.base import Runtime
from kilter.runtimes.step_names import ADOPT, EVALUATE, RECEIVE, SUMMARISE, StepKind, StepName
from kilter.runtimes.step_runner import Absent, Done, StepFailed

log = logging.getLogger("kilter.net")

# Kept in the checkpoint: each site's last accepted reply; the state that peers start from.
_, ACCEPTED, BEGAN = RESERVED
AFTER_THE_END = 50_000  # calls to distribute models late are numbered from here
REMARKS = 1000  # most remarks on record in one round, and orders whose late answers are recognised


@dataclass
class Call:
    """An order that is open."""

    step: StepName
    place: Place
    bodies: dict[str, bytes]
    until: float
    mail: MailMark | None
    cards: dict[str, Card]
    arrived: dict[str, tuple[Reply, Body]] = field(default_factory=dict)  # not yet decoded
    done: dict[str, Done] = field(default_factory=dict)

    @property
    def waiting(self) -> list[str]:
        return [i for i in self.bodies if i not in self.arrived and i not in self.done]


class RelayedMail(Mail):
    """Mail that knows which call wrote it."""

    def __init__(self, mail: Mail, written: MailMark) -> None:
        self._letters = mail._letters
        self.written = written


class ServerRuntime(Runtime):
    """A federation of sites behind a transport; `terms(runtime, name)` is what a site is told when it connects."""

    rotates = False  # whether it is a site that leads its own turn

    def __init__(
        self,
        transport: Transport,
        sites: Sequence[str],
        *,
        run: str,
        seed: int = 0,
        topology: str = "star",
        bench: Rows | None = None,
        public: Rows | None = None,
        classes: int = 0,
        quorum: int | None = None,
        deadline: float = 600.0,
        grace: float = 30.0,
        terms: Callable[[ServerRuntime, str], Head] | None = None,
        preparation: AnyPreparation | None = None,
    ) -> None:
        torch.set_num_threads(1)  # one thread for every fit: the same numbers as in simulation
        super().__init__(sites, seed, topology, bench, public)
        if self.topology.kind == "rotating" and not self.rotates:
            raise Mistake("Where sites aggregate in turn, the server does not: it is a relay (kilter serve does this).")
        self.run, self.session, self.classes, self.traces = run, uuid.uuid4().hex, classes, RoundTraces(run)
        if quorum is not None and not 1 <= quorum <= len(self.ids):
            raise Mistake(f"The quorum is a number of sites from 1 to {len(self.ids)}, not {quorum}.")
        self.quorum = len(self.ids) if quorum is None else quorum  # to begin
        self.enough = (len(self.ids) + 1) // 2 if quorum is None else quorum  # to go on after a deadline
        self.deadline, self.grace, self._transport, self._began = deadline, grace, transport, time.monotonic()
        self._method: Method | None = None
        self._metrics: frozenset[str] | None = None
        self._call: Call | None = None
        self._place: Place = (-1, 0)  # of the last call
        self.opened: Place = (-1, 0)  # of the call for statistics, before the method's first
        self.schema: Schema | None = None  # of the statistics that are asked for
        self.preparation = preparation  # of the data; sites hear it with the terms
        self._first_round: int | None = None  # of this session
        self._late: deque[tuple[str, Place]] = deque(maxlen=REMARKS)  # orders that were not answered in time
        self._remarks: list[tuple[str, str, str]] = []
        self._hellos: dict[str, tuple[int, str]] = {}  # rows and state directory that each site announced
        self._cards: dict[str, Card] = {}  # the sites' public keys for sealed letters
        self._written: MailMark | None = None  # the call that wrote the mail to be delivered
        self._terms = terms or (lambda runtime, name: {"kind": "terms", "run": runtime.run})
        with transport.changed:
            transport.on_message, transport.on_arrival = self._on_message, self._on_arrival
            transport.rehearsal = self._terms_for
            for site in list(transport.sites.values()):
                self._on_arrival(site)

    def bind(self, method: Method) -> None:
        super().bind(method)
        self._place, self._first_round, self._method = self.opened, None, method
        self._metrics = method.task.metric_names() if method.task else None

    # In the transport's thread, `changed` held -------------------------------------------------------------------------

    def _on_arrival(self, site: ConnectedSite) -> None:
        """Tell a site the terms, and ask again what it was asked when the connection was lost."""
        hello, known = site.hello, self._hellos.get(site.name)
        if known and known[0] != hello.rows:
            self._transport.drop(site.name, f"it announced {known[0]} rows before, and now {hello.rows}")
            return
        if known and known[1] != hello.instance:
            self._remark(site.name, "hello", "it came back with another state directory")
        self._hellos[site.name] = hello.rows, hello.instance
        self._cards[site.name] = hello.card
        self._transport.send(site.name, self._terms_for(hello), b"")
        call = self._call
        if call and site.name in call.waiting:
            self._transport.send(site.name, self._order(call, site.name).head(), call.bodies[site.name])

    def _terms_for(self, hello: Hello) -> Head:
        """The terms for a site, in the newest protocol that it speaks, too."""
        return {**self._terms(self, hello.name), "protocol": hello.protocol}

    def _on_message(self, name: str, head: Head, body: Body) -> str | None:
        """A message from a site; a reason if its stream must end."""
        try:
            if kind_of(head) == "refusal":
                return f"it does not agree to the terms: {Refusal.parse(head).why}"
            reply = Reply.parse(head)
        except wire.Malformed as e:
            return str(e)
        if reply.sender != name:
            return "it signs with another's name"
        call, step = self._call, str(reply.step)
        current = (reply.run, reply.session) == (self.run, self.session)
        if current and call and reply.place == call.place and reply.step == call.step and name in call.waiting:
            call.arrived[name] = reply, body
            self._transport.changed.notify_all()
            return None
        if current and (name, reply.place) in self._late:
            self._late.remove((name, reply.place))
            self._remark(name, step, "its reply came after the deadline and was discarded")
            return None
        self._remark(name, step, "a reply to no open order was discarded")
        return "a reply to no open order"

    def _remark(self, name: str, step: str, what: str) -> None:
        if len(self._remarks) < REMARKS:
            self._remarks.append((name, step, what))
        self._transport.note(f"{name}, {step}: {what}")

    def _order(self, call: Call, name: str) -> Order:
        known = self.states.get(ACCEPTED, {}).get(name)
        return Order(
            self.run,
            self.session,
            self._first_round or 0,
            *call.place,
            call.step,
            None if known is None else (known["round"], known["seq"]),
            None if known is None else StateMark(known["instance"], known["generation"]),
            call.mail,
            call.cards,
            self.traces.parent,
        )

    # In the script's thread ------------------------------------------------------------------------------------------

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        if not messages:
            return {}
        with self.traces.call(self.round, str(name)):
            return self._collect(self._ask(name, messages))

    def _collect(self, call: Call) -> dict[str, Done]:
        """The replies to a call, decoded as they come; waits as long as the deadline and the quorum say."""
        name, warned = call.step, False
        while True:
            with self._transport.changed:
                left = self._seconds_left(call)
                if not call.arrived and left > 0:
                    if left == math.inf and not warned:
                        here = sum(i in self._transport.sites for i in call.bodies)
                        log.warning("%s waits for a quorum of %d: %d connected", name, self.enough, here)
                        warned = True
                    self._transport.changed.wait(min(left, 1.0))
                arrived, call.arrived = call.arrived, {}
                if not arrived and left <= 0:
                    break
                for i in arrived:
                    call.done[i] = Done()  # decoded below; it is not waited for any more
            while arrived:  # one at a time, so that only one body is in memory
                i, (reply, body) = arrived.popitem()
                call.done[i] = self._decode(i, reply, body)
                del body
        return self._close_call(call)

    def _close_call(self, call: Call) -> dict[str, Done]:
        """Nobody is waited for any more: those who did not answer failed."""
        with self._transport.changed:
            self._call = None
            missing = call.waiting
            self._late.extend((i, call.place) for i in missing)
            away = {i for i in missing if i not in self._transport.sites}
            remarks, self._remarks = self._remarks, []
        for node, step, what in remarks:
            self.ledger.failed(node, step, what)
        done = self._same_kind(call.step, call.done)
        self.changed.add(ACCEPTED)
        for i in missing:
            why = "it is not connected" if i in away else "it did not answer before the deadline"
            done[i] = Done(error=Absent(why))
        return done

    def _decode(self, name: str, reply: Reply, body: Body) -> Done:
        """What a site answered, if every part of it fits."""
        accepted = self.states.setdefault(ACCEPTED, {})
        known, rows = accepted.get(name), self._hellos[name][0]
        if reply.error:  # its state is as it was
            if known:
                accepted[name] = {**known, "round": reply.round, "seq": reply.seq}
            return Done(error=Absent(reply.error))
        accepted[name] = {"round": reply.round, "seq": reply.seq, **reply.state.plain()}
        try:
            if known and known["generation"] and known["instance"] != reply.state.instance:
                raise wire.Malformed("it uses another state directory than before")
            result = StepResult.parse(wire.decode(body), self.ids)
            tree = result.reply
            if reply.step == EVALUATE:
                tree = check_report(tree, rows, self._metrics)
            if reply.step == SUMMARISE:
                check_statistics(tree, self.schema)
            if reply.letters:
                if not isinstance(tree, dict):
                    raise wire.Malformed("its letters are not letters")
                tree = Post(tree)
            else:
                check_counts(tree, max(rows, self.classes))
            done = Done(tree, None, result.fits, result.seconds, result.notes, wire.facts(tree))
        except wire.Malformed as e:
            return Done(error=Absent(f"its reply cannot be used: {e}"))
        except (TypeError, ValueError, OverflowError, RecursionError, AttributeError, LookupError) as e:
            return Done(error=Absent(f"its reply cannot be used ({type(e).__name__})"))
        if isinstance(body, mmap.mmap) and not isinstance(tree, Post):
            body.madvise(mmap.MADV_DONTNEED)  # it is in a file already: read it when it is needed
            done.kept = Unread(partial(read_again, body))
        return done

    def _same_kind(self, step: StepName, done: dict[str, Done]) -> dict[str, Done]:
        """A step writes letters everywhere or nowhere: the method's annotation decides, without one the majority."""
        kinds = {i: isinstance(d.kept, Post) for i, d in done.items() if d.error is None}
        letters = step.writes_letters
        if step.kind is StepKind.METHOD and kinds:
            annotated = writes_letters(getattr(self._method, step.step, None))
            letters = Counter(kinds.values()).most_common(1)[0][0] if annotated is None else annotated
        for i, is_letters in kinds.items():
            if is_letters != letters:
                why = "its reply consists of letters, and the step writes none" if is_letters else "it wrote no letters"
                done[i] = Done(error=Absent(why))
        return done

    def pool(self, train: Step, combine: Any, state: Tree, to: Any = None, view: Any = None) -> Tree:
        """Replies that pass every check and still cannot be combined cost a round, not the run."""
        try:
            return super().pool(train, combine, state, to, view)
        except (StepFailed, ValueError, ArithmeticError, TypeError, LookupError, RuntimeError) as e:
            log.error("round %d, %s failed", self.round, combine.__name__, exc_info=e)
            why = f"the replies cannot be combined ({type(e.__cause__ or e).__name__}): the state stays as it was"
            self.ledger.failed(self.aggregator, combine.__name__, why, "error")
            return state

    def distribute(
        self, method: Method, state: Tree, best: Params | None, card: str, to: Sequence[str] | None = None
    ) -> list[str]:
        shared = state if isinstance(state, AtNodes) else method.shared(state)
        self.enough = 0  # the run is over: nobody is waited for beyond the deadline
        return list(self.call(RECEIVE, {"state": shared, "best": best, "card": card}, to, training=False, alike=False))

    def reopen(self, round: int, states: dict[str, dict[str, Tree]]) -> None:
        """Go to the end of a finished run. Sites keep the state they had; later orders come after all others."""
        self.round, self.states = round, states
        self._place, self._first_round = (round, AFTER_THE_END), round + 1

    def _ask(self, name: StepName, messages: Mapping[str, Tree]) -> Call:
        """Open a call and send it to the sites that are connected."""
        encoded: dict[int, bytes] = {}  # a broadcast is encoded once
        bodies = {}
        for i, m in messages.items():
            if id(m) not in encoded:
                encoded[id(m)] = wire.encode(m)
            bodies[i] = encoded[id(m)]
        self._place = self.round, (self._place[1] + 1 if self._place[0] == self.round else 1)
        if self._first_round is None:
            self._first_round = self.round
        cards = dict(self._cards) if self.topology.kind == "peers" else {}
        call = Call(name, self._place, bodies, time.monotonic() + self.deadline, self._written, cards)
        with self._transport.changed:
            self._call = call
            for i, body in bodies.items():
                self._transport.send(i, self._order(call, i).head(), body)
        return call

    def deliver(self, posts: Mapping[str, Post], name: StepName) -> Mail:
        """Letters from site to site; a letter to a site out of reach is the sender's failure, and only that letter is lost."""
        allowed: dict[str, Post] = {}
        for sender, post in posts.items():
            reach = {sender, *(self.topology.neighbours[sender] if self.topology.kind == "peers" else self.ids)}
            allowed[sender] = Post({to: letter for to, letter in post.items() if to in reach})
            if len(allowed[sender]) < len(post):
                self.ledger.failed(sender, str(name), "it wrote to a site that it may not write to")
        return RelayedMail(super().deliver(allowed, name), MailMark(*self._place, name))

    def call(
        self,
        name: StepName,
        message: Tree = None,
        to: Sequence[str] | None = None,
        training: bool = True,
        alike: bool = True,
    ) -> Any:
        if name.kind in (StepKind.SPREAD, StepKind.SUBMIT):
            self._adopt_late(self._ordered(to))
        self._written = message.written if isinstance(message, RelayedMail) else None
        replies = super().call(name, message, to, training, alike)
        if name == ADOPT:
            self.states[BEGAN] = {"state": message, "who": dict.fromkeys(replies, True)}
            self.changed.add(BEGAN)
        return replies

    def _adopt_late(self, to: Sequence[str]) -> None:
        """Peers start from the same state, also one that was not connected when the others did."""
        began = self.states.get(BEGAN)
        late = [i for i in to if i in self._transport.sites and began and i not in began["who"]]
        if began and late:
            self._written = None
            replies = super().call(ADOPT, began["state"], late, training=False)
            began["who"] |= dict.fromkeys(replies, True)
            self.changed.add(BEGAN)

    def _seconds_left(self, call: Call) -> float:
        """How many more seconds to wait; 0: no more; infinite: until enough sites have answered."""
        now, left = time.monotonic(), 0.0
        for i in call.waiting:
            until = call.until
            if i not in self._transport.sites:
                until = min(until, self._transport.left.get(i, self._began) + self.grace)
            left = max(left, until - now)
        answered = len(call.done) + len(call.arrived)
        others = sum(i not in call.bodies for i in self._transport.sites)  # connected, but not asked
        if left <= 0 and answered + others < min(self.enough, len(call.bodies) + others):
            return math.inf
        return left

    def announce_terms(self) -> None:
        """Send the terms again, because they hold more now."""
        with self._transport.changed:
            for name, site in self._transport.sites.items():
                self._transport.send(name, self._terms_for(site.hello), b"")

    def wait(self) -> None:
        """Until a quorum is connected."""
        with self._transport.changed:
            while sum(i in self._transport.sites for i in self.ids) < self.quorum:
                self._transport.changed.wait(1.0)

    def close(self, finished: bool = False) -> None:
        """Sites leave when a run is finished; otherwise they wait for the server to come back."""
        self._transport.close(Goodbye(finished))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)
