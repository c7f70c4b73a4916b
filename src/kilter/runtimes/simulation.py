"""The whole federation on one machine: in this process, or spread over persistent worker processes.

Every fit runs on one torch thread, so the numbers are the same whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kilter.chance import derive
from kilter.core import SERVER, Data, Method, Node, Rows, Tree
from kilter.errors import Mistake
from kilter.runtimes.base import Runtime
from kilter.runtimes.host import Done, perform, resolve
from kilter.runtimes.workers import Workers
from kilter.wire import leaves, structure


class Absent(Exception):
    """A node that does not answer; raised by fault rules, never by a method."""


@dataclass(frozen=True)
class Missing:
    """A fault rule: every call at a node fails with this probability, by chance of (seed, round, node, step)."""

    probability: float

    def __call__(self, seed: int, round: int, node: str, step: str) -> str | None:
        lost = derive(seed, round, node, step, "missing") < self.probability * 2**63
        return "it did not answer (simulated)" if lost else None


Fault = Callable[[int, int, str, str], str | None]  # (seed, round, node, step) -> a reason, or None


class Simulation(Runtime):
    """Nodes of one machine, e.g. of `kilter.data.split(...)`.

    `clients` maps node ids to their data; `bench` is the common test set; `public` what the aggregator may hold; `faults` gives
    a reason why a call at a node fails, or None. With `workers` > 1, steps run in that many processes.
    """

    def __init__(
        self,
        clients: Mapping[str, Data],
        *,
        bench: Rows | None = None,
        public: Rows | None = None,
        topology: str = "star",
        seed: int = 0,
        workers: int = 1,
        faults: Fault | None = None,
    ) -> None:
        if not clients:
            raise Mistake("A federation needs at least one client.")
        for name, data in clients.items():
            if not len(data.train):
                raise Mistake(f"Client '{name}' has no training rows: use fewer clients or another partition.")
        if workers < 1:
            raise Mistake(f"There must be at least one worker, not {workers}.")
        torch.set_num_threads(1)
        super().__init__(tuple(clients), seed, topology)
        self.clients = dict(clients)
        self.bench = bench
        self.public = public
        self.faults = faults
        self.workers = min(workers, len(self.ids))
        self.states: dict[str, dict[str, Tree]] = {}  # what nodes keep, the aggregator's role among them
        self.changed: set[str] = set()  # whose state is newer than the last checkpoint
        self._method: Method | None = None
        self._pool: Workers | None = None

    @property
    def has_public(self) -> bool:
        return self.public is not None

    def bind(self, method: Method) -> None:
        super().bind(method)
        self.close()
        self.states, self.changed = {}, set()
        self._method = method
        if self.workers > 1:
            self._pool = Workers(self.workers, self._run_here)

    def node(self, name: str, step: str, round: int, state: dict[str, Tree]) -> Node:
        """A node as its step sees it."""
        nothing = Rows({}, torch.empty(0, dtype=torch.int64))
        data = self.clients.get(name, Data(nothing, nothing, nothing))
        peers = self.topology.neighbours.get(name, ())
        # spread:train draws as train does, so peers over a full graph give the star's numbers
        return Node(name, data, self.seed, round, step.rpartition(":")[2], state, peers, self.public, self.bench)

    def _run_here(
        self, name: str, round: int, messages: Mapping[str, Tree], states: Mapping[str, dict[str, Tree]]
    ) -> dict[str, tuple[Done, dict[str, Tree] | None]]:
        """Perform a step at these nodes in this process: outcomes, and new states where they changed."""
        assert self._method is not None
        nodes = [self.node(i, name, round, states[i]) for i in messages]
        before = [fingerprint(n.state) for n in nodes]
        done = perform(resolve(self._method, name), nodes, list(messages.values()))
        return {
            n.id: (d, None if fingerprint(n.state) == old else n.state)
            for n, d, old in zip(nodes, done, before, strict=True)
        }

    def perform(self, name: str, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        done: dict[str, Done] = {}
        present: dict[str, Tree] = {}
        for i, message in messages.items():
            fault = None if name in ("evaluate", "adopt") else self.faults
            reason = fault(self.seed, self.round, i, name) if fault else None
            if reason:
                done[i] = Done(error=Absent(reason))
            else:
                present[i] = message
        states = {i: self.states.get(i, {}) for i in present}
        run = self._pool.run if self._pool else self._run_here
        for i, (d, state) in run(name, self.round, present, states).items():
            if d.error is not None and not isinstance(d.error, Absent):
                raise d.error
            done[i] = d
            if state is not None:
                self.states[i] = state
                self.changed.add(i)
        return done

    def hub(self, step: Callable[..., Any], *messages: Tree) -> Any:
        if self.topology.kind == "peers":
            raise Mistake(
                f"This method needs one aggregator and so cannot run under '{self.topology.spec}': use star or rotating."
            )
        hub = self.node(self.aggregator, step.__name__, self.round, self.states.setdefault(SERVER, {}))
        before = fingerprint(hub.state)
        (done,) = perform(lambda node, _: step(node, *messages), [hub], [None])
        if done.error is not None:
            raise done.error
        if fingerprint(hub.state) != before:
            self.changed.add(SERVER)
        self.ledger.fitted(hub.step, done.fits, done.seconds)
        self.ledger.notes += [{"node": hub.id, "step": hub.step, "note": text} for text in done.notes]
        return done.reply

    def close(self) -> None:
        """Let the worker processes go."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Seen:
    """What a state was at one moment; equal if it has not changed since."""

    marks: list[Any]  # which tensors (and how often written to), which values, how they nest
    held: list[Any] = field(compare=False, repr=False)  # the tensors: an id is one's own only while one lives


def fingerprint(state: Tree) -> Seen:
    """Tells whether a state was changed."""
    found = list(leaves(state))
    marks = [(p, id(v), v._version) if isinstance(v, torch.Tensor) else (p, v) for p, v in found]
    return Seen([*marks, structure(state)], found)
