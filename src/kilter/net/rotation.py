"""A site's part in a rotating federation: it follows the leader of a round, leads when its turn comes, and hands over.

One site at a time holds the state of the finished rounds. It appoints the leader of the next round, the first in turn that is there
and willing, and keeps the state until that leader has finished. If the leader is lost for longer than the grace, or makes no
progress until the deadline, the holder appoints a successor, who repeats the round: members go back to their state before it. A
leader that finishes asks to be released by the one who appointed it, so a leader that was given up cannot go on. `position.json`
makes all of this survive a restart. If the leader and the holder are both lost, the run waits for one of them.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kilter.net.aggregator import AggregatorRuntime, LinkTransport, SteppedDown, TurnOver
from kilter.net.frames import Head
from kilter.net.hand_over import HandOver, pack_up
from kilter.net.hand_over_inbox import HandOverInbox
from kilter.net.known_turns import KnownTurns
from kilter.net.links import Links
from kilter.net.messages import Order, Reply, kind_of
from kilter.net.order_worker import OrderWorker
from kilter.net.position import Position
from kilter.net.run_reports import Report, RunReports
from kilter.net.site import Site
from kilter.net.succession import Succession
from kilter.net.turns import Ready, Turn, TurnMessage, Waits
from kilter.records.codec import Unreadable
from kilter.records.run_folder import Store
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

PAUSE = 0.25  # seconds between two looks at who is there
SIGN_SECONDS = 10.0  # between two signs of progress of a leader, at most


class Rotation:
    """`start` begins to follow and lead; `done` is the end of the run at this site."""

    def __init__(
        self, site: Site, links: Links, folder: Path, waits: Waits, report: Report, relay: bool = False
    ) -> None:
        assert site.terms is not None
        self.site, self.links, self.terms, self._folder = site, links, site.terms, folder
        self.done: Future[None] = Future()
        self._reports = RunReports(links, self.terms.ids, report, relay)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.position = Position.read(folder)
        self.known = KnownTurns(self.position.turn, self.terms.aggregators, site.experiment.rounds, self.terms.turns)
        self.succession = Succession(site, links, self.known, waits)
        self._lock = threading.RLock()
        self._awake = threading.Event()
        self._worker = OrderWorker(site, self._answer)
        self._incoming = HandOverInbox()
        self._transport: LinkTransport | None = None  # while this site leads
        self._fed: AggregatorRuntime | None = None
        self._sent: tuple[TurnMessage, object] | None = None  # what went out last, and over which connection
        self._taken = False  # the leader that I appointed has stored the hand-over
        self._sign_due = 0.0  # when this leader shows the next sign of progress
        self._threads: list[threading.Thread] = []
        self._closed = False
        links.on_packet, links.on_presence = self._on_packet, self._on_presence

    @property
    def waits(self) -> Waits:
        """How long to wait for others; a relay tells it."""
        return self.succession.waits

    @waits.setter
    def waits(self, waits: Waits) -> None:
        self.succession.waits = waits

    @property
    def ids(self) -> tuple[str, ...]:
        return self.terms.ids

    @property
    def round(self) -> int:
        """The round that this site knows to be under way."""
        return self.known.turn.round

    def ready(self) -> Ready:
        """What the others must know about this site."""
        hello, turn, aggregates = self.site.hello(), self.known.turn, self.site.policy.aggregate
        return Ready(self.site.name, self.links.nonce, hello.rows, hello.instance, hello.card, turn, aggregates)

    def start(self) -> None:
        """Begin to follow and lead. Nothing happens the second time."""
        if self._threads:
            return
        for work in (self._worker.run, self._take_turns):
            thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop. A round that this site leads ends without a result; it is repeated when the site comes back."""
        self._closed = True
        self._worker.stop()
        self._awake.set()
        if self._fed is not None:
            self._fed.step_down()

    def join(self, seconds: float) -> None:
        """After `close`: wait until this site has stopped working."""
        for thread in self._threads:
            thread.join(seconds)

    def end(self) -> None:
        """The run is over."""
        self.close()
        with suppress(Exception):  # it had ended before
            self.done.set_result(None)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            if not self._closed and not self.done.done():
                self.done.set_exception(e)

    # In the links' thread -------------------------------------------------------------------------------------------

    def _on_presence(self) -> None:
        with self.links.changed:
            turns = {name: ready.turn for name, (ready, _) in self.links.present.items()}
        for name, turn in turns.items():
            if name in self.terms.aggregators and turn.round <= self.site.experiment.rounds:
                self._observe(turn, "")
        if (transport := self._transport) is not None:
            transport.refresh()
        self._awake.set()

    def _on_packet(self, sender: str, head: Head, body: bytes) -> None:
        try:
            if kind_of(head) == "order":
                self._on_order(sender, head, body)
            elif kind_of(head) == "reply":
                if (transport := self._transport) is not None:
                    transport.reply(sender, head, body)
            else:
                self._on_turn(sender, TurnMessage.parse(head), body)
        except (Malformed, Unreadable) as e:
            self.links.note(f"{sender} sent something that cannot be used: {e}")

    def _on_order(self, sender: str, head: Head, body: bytes) -> None:
        turn, order = Turn.parse(head.get("turn")), Order.parse(head)
        self.known.check(sender, turn)
        if not self.known.leads(sender, turn):
            self.links.send(sender, TurnMessage("stale", self.known.turn).head())
            return
        self._observe(turn, sender)
        self._worker.put(sender, turn, order, body)

    def _on_turn(self, sender: str, message: TurnMessage, body: bytes) -> None:
        position, turn = self.position, message.turn
        if message.kind == "stale" and sender not in self.terms.aggregators:
            return  # the leader that it follows will say so itself
        self.known.check(sender, turn)
        if message.kind in ("books", "hand-over"):
            self._receive_hand_over(sender, message, body)
        elif message.kind == "taken":
            self._taken |= (position.appointed, position.next_turn) == (sender, turn)
        elif message.kind == "finished":
            self._release(sender, turn)
        elif message.kind == "released":
            if (position.phase, position.turn, position.previous) == ("finished", turn, sender):
                self._move(replace(position, phase="holding", attempt=0, appointed=""), position)
        elif message.kind == "stale":
            self._observe(turn, "")
        elif not self.known.leads(sender, turn):
            log.info("%s of %s was ignored: it does not lead", message.kind, sender)
        elif message.kind == "leading":
            self._observe(turn, sender)
        elif message.kind == "over":
            self.end()
        else:
            self._reports.receive(message.kind, body)
        self._awake.set()

    def _receive_hand_over(self, sender: str, message: TurnMessage, body: bytes) -> None:
        """Keep a hand-over until it is taken. It must come from the site that has the state, as far as this site knows."""
        holder = self.known.holder(message.turn)
        if holder not in ("", sender) and self.links.away(holder) == 0:
            raise Malformed(f"a hand-over of round {message.turn.round}, whose state {holder} has")
        if message.kind == "books":
            self._incoming.put_books(sender, message.turn, body)
        else:
            self._incoming.put(sender, message, body)

    def _release(self, sender: str, turn: Turn) -> None:
        """The leader has finished: it may go on, unless I have given it up."""
        with self._lock:
            position, mine = self.position, self.position.next_turn
            holds = position.phase == "holding" and mine.round == turn.round
            appointed = turn == mine and sender == position.appointed
            given_up = turn < self.known.turn or (holds and not appointed)
            if holds and appointed:
                self._move(Position(turn), position)
        answer = TurnMessage("stale", max(self.known.turn, mine)) if given_up else TurnMessage("released", turn)
        self.links.send(sender, answer.head())

    def _observe(self, turn: Turn, leader: str) -> None:
        """Somebody follows this turn, or leads it: lower ones of mine end."""
        with self._lock:
            higher = self.known.observe(turn, leader)
            position = self.position
            replaced = turn == position.turn and self.known.leader not in ("", self.site.name)
            if position.phase in ("leading", "finished") and (turn > position.turn or replaced):
                log.warning("round %d goes on without this site as its leader", turn.round)
                self._move(Position(turn), position)
                if self._fed is not None:
                    self._fed.step_down()
            elif higher and position.phase == "holding" and turn.round > position.next_turn.round:
                self._move(Position(turn), position)

    def _move(self, position: Position, before: Position) -> None:
        """Note where this site stands, on disk first; nothing if it has moved on since `before`."""
        with self._lock:
            if self.position != before:
                return
            position.write(self._folder)
            self.position, self._sent, self._taken = position, None, False
            if position.phase == "member":
                self.succession.forget()
        self._awake.set()

    def _answer(self, leader: str, reply: Reply, body: bytes) -> None:
        """Send a reply to the leader, which may be this site."""
        if leader != self.site.name:
            self.links.send(leader, reply.head(), body)
        elif self._transport is not None:
            self._transport.reply(leader, reply.head(), body)

    # Turns, in a thread of their own --------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        while not self._closed:
            while (arrived := self._incoming.take()) is not None:
                self._take_over(*arrived)
            self.position.clean(self._folder)
            phase = self.position.phase
            if phase == "leading":
                self._lead()
            elif phase == "over":
                self._announce_end()
            elif self.links.online:
                {"member": self._begin, "finished": self._ask_release, "holding": self._appoint}[phase]()
            if self.position.phase != "leading":
                self._awake.wait(PAUSE)
                self._awake.clear()

    def _begin(self) -> None:
        """Lead the first round, if nobody has and it falls to this site."""
        turn, leader, attempt = self.known.turn, self.known.leader, 0
        if turn.round > 1:
            self.succession.watch()
            return
        if not self.known.nobody_leads:  # somebody leads the first round: take over only if it is lost
            if leader in ("", self.site.name) or not self.succession.gives_up(leader, 1):
                return
            attempt = turn.attempt + 1
        with self.links.changed:
            here = len(self.links.present) + 1
        needed = self.waits.quorum or len(self.terms.ids)
        if (here >= needed or attempt) and self.succession.choose(1) == self.site.name:
            first = Turn(1, attempt)
            self._move(Position(first, "leading", "", self._place(first).name), self.position)

    def _take_over(self, sender: str, message: TurnMessage, books: bytes, body: bytes) -> None:
        """Store a hand-over; from then on this site leads."""
        turn, position = message.turn, self.position
        if turn == position.turn and position.phase in ("leading", "finished"):  # it came twice
            self.links.send(sender, TurnMessage("taken", turn).head())
            return
        if turn < self.known.turn or (position.phase == "holding" and turn <= position.next_turn):
            self.links.send(sender, TurnMessage("stale", max(self.known.turn, position.next_turn)).head())
            return
        if not self.site.policy.aggregate or self.site.name not in self.terms.aggregators:
            self.links.note(f"{sender} wants this site to aggregate, which its policy or role does not allow")
            return
        try:
            received = HandOver.parse(books, body, message.sizes, self.site.experiment)
            if received.saved.at.round != turn.round - 1:
                raise Malformed("a hand-over of another round")
        except Malformed as e:
            self.links.note(f"the hand-over of {sender} cannot be used: {e}")
            return
        place = self._place(turn)
        shutil.rmtree(place, ignore_errors=True)
        received.write(place, self.site.method.task.names)
        self._observe(turn, self.site.name)
        self._move(Position(turn, "leading", sender, place.name), self.position)
        self.links.send(sender, TurnMessage("taken", turn).head())

    def _place(self, turn: Turn) -> Path:
        return self._folder / f"turn-{turn.round}-{turn.attempt}"

    def _lead(self) -> None:
        """Run the round of my turn."""
        position, site = self.position, self.site
        turn, folder = position.turn, self._folder / position.folder
        self._observe(turn, site.name)
        log.info("round %d: this site aggregates%s", turn.round, f" (attempt {turn.attempt + 1})" * (turn.attempt > 0))
        transport = LinkTransport(self.links, self.ready(), self.terms.description, turn, self._ask_myself)
        waits = self.waits
        fed = AggregatorRuntime(transport, site, waits.quorum or None, waits.deadline, waits.grace)
        fed.on_progress, self._sign_due = self._show_progress, 0.0
        fed.robust, fed.precision = site.experiment.robust, site.experiment.precision
        self._transport, self._fed = transport, fed
        transport.refresh()
        store = Store(folder)
        try:
            if self._closed or self.position != position:
                return
            watch = partial(self._reports.record, turn)
            site.experiment.run(site.method, fed, store, watch, checkpoint_seconds=0.0)
        except TurnOver:
            self._move(replace(position, phase="finished"), position)
        except SteppedDown:
            log.info("round %d: this site leads no longer", turn.round)
        except Exception:
            if self.position == position:  # otherwise the others follow somebody else already
                raise
        else:
            self._move(replace(position, phase="over"), position)
        finally:
            self._transport = self._fed = None
            store.close()

    def _ask_myself(self, head: Head, body: bytes) -> None:
        self._worker.put(self.site.name, Turn.parse(head.get("turn")), Order.parse(head), body)

    def _show_progress(self) -> None:
        """Called by the script of my turn while it works: tell the others now and then, several times before the deadline."""
        if (now := time.monotonic()) >= self._sign_due:
            self._sign_due = now + min(SIGN_SECONDS, self.waits.deadline / 4)
            self._reports.leading(self.position.turn)

    def _ask_release(self) -> None:
        """Go on only if the one who appointed me has not given me up; if it is lost, it cannot have."""
        position = self.position
        if position.previous in ("", self.site.name) or self.links.away(position.previous) > self.waits.grace:
            self._move(replace(position, phase="holding", attempt=0, appointed=""), position)
        else:
            self._send_once(position.previous, TurnMessage("finished", position.turn))

    def _send_once(self, to: str, message: TurnMessage, *bodies: tuple[TurnMessage, bytes]) -> bool:
        """Send a message unless it went out over this connection already; whether it went out now."""
        connection = self.links.connection_to(to)
        if connection is None or self._sent == (message, connection):
            return False
        self._sent = message, connection
        for head, body in bodies or ((message, b""),):
            self.links.send(to, head.head(), body)
        return True

    def _appoint(self) -> None:
        """Choose the leader of the next round, hand over to it, and wait until it has finished."""
        before = position = self.position
        if position.appointed:
            if not self.succession.gives_up(position.appointed, position.next_turn.round):
                if not self._taken:
                    self._hand_over(position)
                return
            position = replace(position, attempt=position.attempt + 1, appointed="")
        name = self.succession.choose(position.next_turn.round)
        if name == self.site.name:
            self._move(Position(position.next_turn, "leading", "", position.folder), before)
        elif name is not None:
            self.known.progressed()  # its time runs from now on
            self._move(replace(position, appointed=name), before)

    def _hand_over(self, position: Position) -> None:
        """Send the state, the memory and the books. Every byte is in the audit log before it leaves."""
        to, turn = position.appointed, position.next_turn
        if self.links.connection_to(to) is None or (self._sent and self._sent[1] == self.links.connection_to(to)):
            return
        parts, books = pack_up(self._folder / position.folder, self.site, to, turn)
        message, body = TurnMessage("hand-over", turn, tuple(map(len, parts))), b"".join(parts)
        self._send_once(to, message, (TurnMessage("books", turn), books), (message, body))

    def _announce_end(self) -> None:
        """Tell everybody that the run is over; with a relay, until it says goodbye."""
        message, connection = TurnMessage("over", self.position.turn), self.links.connection
        if self._sent == (message, connection) or not self.links.online:
            return
        self._reports.end(self.position.turn, self._folder / self.position.folder)
        if not self._reports.relay:
            self.end()
        self._sent = message, connection
