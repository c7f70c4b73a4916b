"""The runtime of a peer: the same script as everywhere, run by each peer for itself. `execute` runs only this peer's own node; its
letters go to its neighbours, and theirs are waited for when the script needs them.

A peer never sees what others return, only what they write to it. So its record, evaluation and checkpoint are its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from kilter.core import Data, Mail, Method, Post, Replies, Rows, Tree
from kilter.errors import Mistake
from kilter.net.audit import AuditLog
from kilter.net.fields import Place
from kilter.net.messages import PeerLetter
from kilter.net.peer_transport import PeerTransport
from kilter.records import wire
from kilter.runtimes.base import Runtime
from kilter.runtimes.reply_checks import checked
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import Done, resolve, run_step

log = logging.getLogger("kilter.net")


class Incoming(Mail):
    """Letters of one call on their way to me, from these senders; and the one I wrote to myself."""

    at: Place
    step: StepName
    senders: tuple[str, ...]
    own: dict[str, Tree]


class Letters(Incoming):
    """What a step that I took part in wrote."""

    def __init__(self, at: Place, step: StepName, senders: tuple[str, ...], own: dict[str, Tree]) -> None:
        self.at, self.step, self.senders, self.own = at, step, senders, own


class RepliesOrLetters(Replies, Incoming):
    """What comes of a step that I did not take part in: no reply that I see, perhaps letters."""

    def __init__(self, at: Place, step: StepName, senders: tuple[str, ...], of: int) -> None:
        super().__init__({}, of)
        self.at, self.step, self.senders, self.own = at, step, senders, {}


class PeerRuntime(Runtime):
    """One of the peers: `me`, with its data and its transport. With `audit`, every letter is recorded before it leaves."""

    exhibits = False

    def __init__(
        self,
        transport: PeerTransport,
        ids: Sequence[str],
        data: Data,
        *,
        topology: str,
        seed: int = 0,
        bench: Rows | None = None,
        public: Rows | None = None,
        deadline: float = 600.0,
        grace: float = 30.0,
        quorum: int | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        torch.set_num_threads(1)  # one thread for every fit: the same numbers as in simulation
        super().__init__(ids, seed, topology, bench, public)
        if self.topology.kind != "peers":
            raise Mistake(f"Peers need a graph (full, ring, ...), and the experiment's topology is '{topology}'.")
        self.me, self.transport = transport.me, transport
        self.clients = {self.me: data}
        self.deadline, self.grace = deadline, grace
        self.quorum = len(self.ids) if quorum is None else quorum
        self._audit = audit
        self._place: Place = (-1, 0)
        self._failed = False
        self._method: Method | None = None
        self._resumed = False

    def bind(self, method: Method) -> None:
        super().bind(method)
        self._method = method

    def after(self, round: int) -> int:
        """The next round. If the others went on without this peer, the round of the neighbour that is furthest behind."""
        next_round = round + 1
        if not self._resumed or self.transport.missed:
            self._resumed = True
            there = self.transport.greet(next_round)
            near = [there[i] for i in self.topology.neighbours[self.me] if i in there]
            ahead = max(next_round, min(near, default=0)) if self.transport.missed else next_round
            if next_round < ahead <= self.rounds:
                log.warning("the others are in round %d: going on with them", ahead)
                next_round = ahead
            self.transport.missed = False
        self.transport.enter(next_round)
        return next_round

    def wait(self) -> None:
        """Until enough peers are there."""
        while len({*self.transport.greet(0), *self.transport.rounds}) + 1 < self.quorum:
            time.sleep(0.2)

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        if self.me not in messages:
            return {}
        assert self._method is not None
        node = self.node(self.me, name, self.round, self.states.setdefault(self.me, {}))
        with self.computing():
            (done,) = run_step(resolve(self._method, name), [node], [messages[self.me]])
        self.changed.add(self.me)
        if done.error is not None:
            log.error("round %d, %s failed", self.round, name, exc_info=done.error)
            self._failed = True
        return {self.me: done}

    def call(
        self,
        name: StepName,
        message: Tree = None,
        to: Sequence[str] | None = None,
        training: bool = True,
        alike: bool = True,
    ) -> Any:
        to = self._ordered(to)
        if isinstance(message, Incoming):
            message = Mail({self.me: self._collect(message, name)}) if self.me in to else Mail({})
        self._place = (self.round, self._place[1] + 1 if self._place[0] == self.round else 1)
        self.transport.seq = self._place[1]
        self._failed = False
        self._senders = tuple(i for i in to if i in self.topology.neighbours[self.me])
        replies = super().call(name, message, to, training, alike)
        if self._failed:
            self._write({}, name)  # nobody need wait for me
        if self.me not in to or self._failed:
            return RepliesOrLetters(self._place, name, self._senders, len(self.ids))
        return replies

    def deliver(self, posts: Mapping[str, Post], name: StepName) -> Mail:
        """Send my letters to my neighbours, and an empty one to those without; theirs are read when they are needed."""
        post = posts[self.me]
        for receiver in post:
            if receiver != self.me and receiver not in self.topology.neighbours[self.me]:
                raise ValueError(f"{self.me} wrote to {receiver}, who is not its neighbour, in {name}")
        self._write(post, name)
        own = {self.me: post[self.me]} if self.me in post else {}
        return Letters(self._place, name, self._senders, own)

    def _write(self, post: Mapping[str, Tree], name: StepName) -> None:
        letters: dict[str, tuple[PeerLetter, bytes]] = {}
        encoded: dict[int, bytes] = {}  # the same letter to all is encoded once
        gave_up = tuple(self.transport.gone)
        for to in self.topology.neighbours[self.me]:
            if to in post and id(post[to]) not in encoded:
                encoded[id(post[to])] = wire.encode(post[to])
            body = encoded[id(post[to])] if to in post else b""
            self.ledger.letter(self.me, to, len(body))
            letters[to] = (
                PeerLetter(self.transport.run, self.me, to, *self._place, name, to not in post, gave_up),
                body,
            )
            if self._audit and body:
                self._record(to, name, body)
        self.transport.send(self._place, letters)

    def _record(self, to: str, name: StepName, body: bytes) -> None:
        assert self._audit is not None
        assert self._method is not None
        kinds = " ".join(sorted(self._method.discloses()))
        run = self.transport.run
        self._audit.record("letter", body, run=run, round=self.round, step=str(name), kinds=kinds, to=to, approval=run)

    def _collect(self, mail: Incoming, name: StepName) -> dict[str, Tree]:
        """My letters of that call: waited for until the deadline, or until their sender is gone."""
        transport, until = self.transport, time.monotonic() + self.deadline
        box = dict(mail.own)
        with transport.changed:
            while waiting := [i for i in mail.senders if (mail.at, i) not in transport.inbox and not self._is_gone(i)]:
                left = until - time.monotonic()
                if left <= 0:
                    for i in waiting:
                        transport.gone[i] = self.round
                        transport.note(f"{i} is gone: its letter of {mail.step} did not come")
                    break
                transport.changed.wait(min(left, 0.2))
            came = {i: transport.inbox[mail.at, i] for i in mail.senders if (mail.at, i) in transport.inbox}
            for key in [key for key in transport.inbox if key[0] < mail.at]:
                del transport.inbox[key]
        for i in mail.senders:
            if i not in came:
                self.ledger.failed(i, str(mail.step), "its letter did not come")
            elif not came[i][0].empty:
                try:
                    box[i] = wire.decode(came[i][1])
                    self.ledger.letter(i, self.me, len(came[i][1]))
                except wire.Malformed as e:
                    self.ledger.failed(i, str(mail.step), str(e))
        assert self._method is not None
        box, notes = checked({i: box[i] for i in self.ids if i in box}, self._method, mail.step, self.me)
        for why in notes:
            self.ledger.refused_letter(self.me, str(name), why)
        return box

    def _is_gone(self, name: str) -> bool:
        """Unreachable for longer than the grace, or its letter did not come in time; hold `changed`."""
        down = self.transport.down.get(name)
        if down is not None and time.monotonic() - down > self.grace and name not in self.transport.gone:
            self.transport.gone[name] = self.round
            self.transport.note(f"{name} is gone: it cannot be reached")
        return name in self.transport.gone

    def here(self) -> list[str]:
        """Peers that were heard from and are not gone."""
        with self.transport.changed:
            return [i for i in self.ids if i in self.transport.rounds and not self._is_gone(i)]

    def close(self) -> None:
        self.transport.flush(self.grace)
        self.transport.close()
        if self._audit:
            self._audit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
