"""The runtime of a peer: the same script, read in the first person. `execute` runs only my own node; my letters go to my
neighbours, and theirs are waited for when the script needs them.

What others return is never seen here, only what they write to me. So a peer's record, evaluation and checkpoint are its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from kilter.core import Data, Mail, Method, Post, Replies, Rows, Tree
from kilter.errors import Mistake
from kilter.net.frames import Head
from kilter.net.peer_transport import Office, Place
from kilter.records import wire
from kilter.runtimes.base import Runtime
from kilter.runtimes.reply_checks import checked
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import Done, resolve, run_step

log = logging.getLogger("kilter.net")


class Incoming(Mail):
    """Letters of one call that are on their way to me, from these senders; and the one I wrote to myself."""

    at: Place
    step: StepName
    senders: tuple[str, ...]
    own: dict[str, Tree]


class Letters(Incoming):
    def __init__(self, at: Place, step: StepName, senders: tuple[str, ...], own: dict[str, Tree]) -> None:
        self.at, self.step, self.senders, self.own = at, step, senders, own


class Perhaps(Replies, Incoming):
    """What comes of a step I did not take part in: no reply that I see, perhaps letters."""

    def __init__(self, at: Place, step: StepName, senders: tuple[str, ...], of: int) -> None:
        super().__init__({}, of)
        self.at, self.step, self.senders, self.own = at, step, senders, {}


class Peer(Runtime):
    """One of the peers: `me`, with its data, behind a post office."""

    def __init__(
        self,
        office: Office,
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
    ) -> None:
        torch.set_num_threads(1)  # every fit on one thread: the same numbers as in simulation
        super().__init__(ids, seed, topology, bench, public)
        if self.topology.kind != "peers":
            raise Mistake(f"Peers need a graph (full, ring, ...), and the experiment's topology is '{topology}'.")
        self.me, self.office = office.me, office
        self.clients = {self.me: data}
        self.deadline, self.grace = deadline, grace
        self.quorum = len(self.ids) if quorum is None else quorum
        self._place: Place = (-1, 0)
        self._failed = False
        self._method: Method | None = None
        self._resumed = False

    def bind(self, method: Method) -> None:
        super().bind(method)
        self._method = method

    def after(self, round: int) -> int:
        """The next round; one that the others went on without enters the round of its hindmost neighbour."""
        next_round = round + 1
        if not self._resumed or self.office.missed:
            self._resumed = True
            there = self.office.greet(next_round)
            near = [there[i] for i in self.topology.neighbours[self.me] if i in there]
            ahead = max(next_round, min(near, default=0)) if self.office.missed else next_round
            if ahead > next_round:
                log.warning("the others are in round %d: going on with them", ahead)
            next_round = ahead
            self.office.missed = False
        self.office.enter(next_round)
        return next_round

    def wait(self) -> None:
        """Until enough of us are there."""
        while len({*self.office.greet(0), *self.office.rounds}) + 1 < self.quorum:
            time.sleep(0.2)

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        if self.me not in messages:
            return {}
        assert self._method is not None
        node = self.node(self.me, name, self.round, self.states.setdefault(self.me, {}))
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
        self.office.seq = self._place[1]
        self._failed = False
        self._senders = tuple(i for i in to if i in self.topology.neighbours[self.me])
        found = super().call(name, message, to, training, alike)
        if self._failed:
            self._write({}, name)  # nobody need wait for me
        if self.me not in to or self._failed:
            return Perhaps(self._place, name, self._senders, len(self.ids))
        return found

    def deliver(self, posts: Mapping[str, Post], name: StepName) -> Mail:
        """My letters to my neighbours, an empty one to those I have nothing to say to; theirs come when they are needed."""
        post = posts[self.me]
        for receiver in post:
            if receiver != self.me and receiver not in self.topology.neighbours[self.me]:
                raise ValueError(f"{self.me} wrote to {receiver}, who is not its neighbour, in {name}")
        self._write(post, name)
        own = {self.me: post[self.me]} if self.me in post else {}
        return Letters(self._place, name, self._senders, own)

    def _write(self, post: Mapping[str, Tree], name: StepName) -> None:
        letters: dict[str, tuple[Head, bytes]] = {}
        encoded: dict[int, bytes] = {}  # the same letter to all is encoded once
        for to in self.topology.neighbours[self.me]:
            if to in post and id(post[to]) not in encoded:
                encoded[id(post[to])] = wire.encode(post[to])
            body = encoded[id(post[to])] if to in post else b""
            self.ledger.letter(self.me, to, len(body))
            head: Head = {"kind": "letter", "run": self.office.run, "from": self.me, "to": to, "step": str(name)}
            letters[to] = {**head, "round": self._place[0], "seq": self._place[1], "empty": to not in post}, body
        self.office.send(self._place, letters)

    def _collect(self, mail: Incoming, name: StepName) -> dict[str, Tree]:
        """My letters of that call: waited for until the deadline, or until their sender is gone."""
        office, until = self.office, time.monotonic() + self.deadline
        box = dict(mail.own)
        with office.changed:
            while waiting := [i for i in mail.senders if (mail.at, i) not in office.inbox and not self._is_gone(i)]:
                left = until - time.monotonic()
                if left <= 0:
                    for i in waiting:
                        office.gone[i] = self.round
                        office.note(f"{i} is gone: its letter of {mail.step} did not come")
                    break
                office.changed.wait(min(left, 0.2))
            came = {i: office.inbox[mail.at, i] for i in mail.senders if (mail.at, i) in office.inbox}
            for key in [key for key in office.inbox if key[0] < mail.at]:
                del office.inbox[key]
        for i in mail.senders:
            if i not in came:
                self.ledger.failed(i, str(mail.step), "its letter did not come")
            elif not came[i][0].get("empty"):
                try:
                    box[i] = wire.decode(came[i][1])
                    self.ledger.letter(i, self.me, len(came[i][1]))
                except wire.Malformed as e:
                    self.ledger.failed(i, str(mail.step), str(e))
        assert self._method is not None
        box, notes = checked({i: box[i] for i in self.ids if i in box}, self._method, mail.step, self.me)
        self.ledger.notes += [{"node": self.me, "step": str(name), "note": text} for text in notes]
        return box

    def _is_gone(self, name: str) -> bool:
        """Not reachable for longer than the grace, or said to be gone by me or by others; hold `changed`."""
        down = self.office.down.get(name)
        if down is not None and time.monotonic() - down > self.grace and name not in self.office.gone:
            self.office.gone[name] = self.round
            self.office.note(f"{name} is gone: it cannot be reached")
        return name in self.office.gone

    def here(self) -> list[str]:
        """Who was heard of and is not gone."""
        with self.office.changed:
            return [i for i in self.ids if i in self.office.rounds and not self._is_gone(i)]

    def close(self) -> None:
        self.office.flush(self.grace)
        self.office.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
