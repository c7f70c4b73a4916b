"""What all runtimes share: who takes part, whom a message reaches, what a reply must look like, what each topology pools.

A runtime implements one method, `execute`: run the named step at these nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kilter import trees
from kilter.core import (
    SERVER,
    AtNodes,
    Data,
    Each,
    Federation,
    Mail,
    Method,
    Node,
    Post,
    Replies,
    Rows,
    Step,
    Tree,
    Unread,
)
from kilter.errors import Mistake
from kilter.fast import switch
from kilter.records import wire
from kilter.runtimes.evaluation import parts, predict_part
from kilter.runtimes.ledger import Ledger
from kilter.runtimes.reply_checks import Shape, oversized
from kilter.runtimes.robust import robust
from kilter.runtimes.step_names import ADOPT, StepName
from kilter.runtimes.step_runner import Done, run_step
from kilter.seeds import derive_each
from kilter.topology import topology

NOTHING = Rows({}, torch.empty(0, dtype=torch.int64))


class Runtime(Federation):
    """A federation over some topology, up to how steps are performed.

    `bench` is the common test set; `public` what the aggregator may hold.
    """

    def __init__(
        self, ids: Sequence[str], seed: int, spec: str, bench: Rows | None = None, public: Rows | None = None
    ) -> None:
        self.ids = tuple(ids)
        self.seed = seed
        self.round = 0
        self.topology = topology(spec, self.ids, seed)
        self.ledger = Ledger()
        self.role = ""  # who holds the aggregator's role (rotating)
        self.robust = ""  # what is done to replies before they are combined (kilter.runtimes.robust)
        self.plain = False  # whether accelerated code (kilter.fast) is switched off
        self.clients: dict[str, Data] = {}  # whose data is here
        self.bench = bench
        self.public = public
        self.states: dict[str, dict[str, Tree]] = {}  # what is kept here, the aggregator's own among it
        self.changed: set[str] = set()  # whose state is newer than the last checkpoint
        self.shared: dict[str, int] = {}  # how many processes shared each step the last time, where they do

    @abstractmethod
    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        """Run the step of this name at these nodes, each with its message."""

    def bind(self, method: Method) -> None:
        """Take up a method before its first step, on a clean page."""
        self.round, self.role, self.ledger = 0, "", Ledger()
        self.states, self.changed = {}, set()
        if "public" in method.needs and not self.has_public:
            raise Mistake(
                f"{type(method).__name__} gives the aggregator a small public data set: "
                "set some rows of each class aside (--public 10) or give a file (--public-file)."
            )
        if "everyone" in method.needs and any(len(n) < len(self.ids) - 1 for n in self.topology.neighbours.values()):
            raise Mistake(
                f"In {type(method).__name__} anyone may write to anyone, which '{self.topology.spec}' does not allow: "
                "use the topology full."
            )
        if "aggregator" in method.needs and self.topology.kind == "peers":
            raise Mistake(
                f"{type(method).__name__} needs one aggregator and so cannot run under '{self.topology.spec}': "
                "use the topology star or rotating."
            )

    @property
    def has_public(self) -> bool:
        return self.public is not None

    def hub(self, step: Callable[..., Any], *messages: Tree) -> Any:
        if self.topology.kind == "peers":
            raise Mistake(
                f"This method needs one aggregator and so cannot run under '{self.topology.spec}': use star or rotating."
            )
        hub = self.node(self.aggregator, StepName(step.__name__), self.round, self.states.setdefault(SERVER, {}))
        before = fingerprint(hub.state)
        with switch.plain(self.plain):
            (done,) = run_step(lambda node, _: step(node, *messages), [hub], [None])
        if done.error is not None:
            raise done.error
        if fingerprint(hub.state) != before:
            self.changed.add(SERVER)
        self.ledger.fitted(hub.step, done.fits, done.seconds)
        self.ledger.notes += [{"node": hub.id, "step": hub.step, "note": text} for text in done.notes]
        return done.reply

    def node(self, name: str, step: StepName, round: int, state: dict[str, Tree]) -> Node:
        """A node as its step sees it."""
        peers = self.topology.neighbours.get(name, ())
        data = self.clients.get(name, Data(NOTHING, NOTHING, NOTHING))
        aggregates = self.topology.kind != "star" or name == SERVER  # now or in its turn
        public = self.public if aggregates else None
        # `spread:train` draws the same random numbers as `train`, so peers over a full graph give the star's results.
        return Node(name, data, self.seed, round, step.step, state, peers, public, self.bench)

    def look(self, method: Method, state: Tree) -> Tensor | None:
        """What the global model says of the common test set; None if there is no such model."""
        assert self.bench is not None
        return joined(predict_part(method, state, self.bench, part) for part in range(parts(self.bench)))

    def after(self, round: int) -> int:
        """The round that follows this one; a participant that was away skips to where the others are."""
        return round + 1

    def sample(self, cohort: float) -> tuple[str, ...]:
        if not 0 < cohort <= 1:
            raise Mistake(f"The cohort is a share of the nodes, above 0 and at most 1, not {cohort}.")
        k = max(1, round(cohort * len(self.ids)))
        if k == len(self.ids):
            return self.ids
        # Everyone draws a lot by name, so the same nodes are chosen whatever the order they are listed in.
        lots = derive_each([self.seed, self.round], self.ids, "sample")
        return tuple(self.ids[i] for i in sorted(lots.argsort(kind="stable")[:k]))

    @property
    def aggregator(self) -> str:
        """The name of whoever aggregates in this round, where there is one."""
        return SERVER if self.topology.kind == "star" else self.topology.aggregator(self.round, self.ids)

    def map(self, step: Step, message: Tree = None, to: Sequence[str] | None = None) -> Any:
        return self.call(StepName(step.__name__), message, to, alike=getattr(step, "alike", True))

    def call(
        self,
        name: StepName,
        message: Tree = None,
        to: Sequence[str] | None = None,
        training: bool = True,
        alike: bool = True,
    ) -> Any:
        """`map`, by the step's name; `training=False` books its traffic as evaluation's; `alike`: replies have one shape."""
        to = self._ordered(to)
        peers = self.topology.kind == "peers"
        if isinstance(message, Mail):
            messages: dict[str, Tree] = {i: message.box(i) for i in to}
        elif isinstance(message, Each):
            messages = {i: message[i] for i in to if i in message}
        else:
            messages = dict.fromkeys(to, message)
        if not peers and not isinstance(message, Mail):
            known: dict[int, int] = {}  # a broadcast is measured once
            for node, m in messages.items():
                size = known[id(m)] = known.get(id(m)) or wire.size(m)
                self.ledger.letter(self.aggregator, node, size, training)
        done = self.execute(name, messages)
        replies, sizes = self._accept(name, {i: done[i] for i in to if i in done}, training, alike and training)
        if any(isinstance(r, Post) for r in replies.values()):
            return self.deliver({i: r for i, r in replies.items() if isinstance(r, Post)}, name)
        if not peers:
            for node in replies:
                self.ledger.letter(node, self.aggregator, sizes[node], training)
        return Replies(replies, of=len(self.ids))

    def deliver(self, posts: Mapping[str, Post], name: StepName) -> Mail:
        """Letters to those they are for; whoever they are not allowed to reach is a mistake of the method."""
        boxes: dict[str, dict[str, Tree]] = {}
        for sender in self.ids:
            for receiver, letter in posts.get(sender, {}).items():
                allowed = (
                    receiver == sender or self.topology.kind != "peers" or receiver in self.topology.neighbours[sender]
                )
                if not allowed:
                    raise ValueError(f"{sender} wrote to {receiver}, who is not its neighbour, in {name}")
                self.ledger.letter(sender, receiver, wire.size(letter))
                boxes.setdefault(receiver, {})[sender] = letter
        return Mail(boxes)

    def _accept(
        self, name: StepName, done: Mapping[str, Done], training: bool, alike: bool
    ) -> tuple[dict[str, Tree | Unread], dict[str, int]]:
        """Valid replies and their bytes; the others go on record with a reason.

        The one shape of replies that are alike is the commonest, and none may be absurdly larger than most. One on
        disk is read once, and not kept.
        """
        step = str(name)
        replies: dict[str, Tree | Unread] = {}
        sizes: dict[str, int] = {}
        shapes: dict[str, Shape] = {}
        norms: dict[str, float] = {}
        for node, d in done.items():
            self.ledger.fitted(name.step, d.fits, d.seconds)
            if d.error is not None:
                self.ledger.failed(node, step, str(d.error))
            elif (seen := d.seen or wire.facts(d.reply)).bad:
                self.ledger.failed(node, step, f"its reply is not finite at {seen.bad}")
            else:
                replies[node] = d.kept
                if not isinstance(d.kept, Post):
                    sizes[node] = seen.size
                    if alike:
                        shapes[node], norms[node] = seen.signature, seen.norm
                if training:
                    self.ledger.participants[node] = None
            self.ledger.notes += [{"node": node, "step": step, "note": text} for text in d.notes]
        if len(set(shapes.values())) > 1:
            usual = Counter(shapes.values()).most_common(1)[0][0]
            for node, shape in shapes.items():
                if shape != usual:
                    self.ledger.failed(
                        node, step, f"its reply has another shape than the others': {_difference(shape, usual)}"
                    )
                    del replies[node], norms[node], self.ledger.participants[node]
        for node in oversized(norms):
            self.ledger.failed(node, step, f"its reply is absurdly large: a norm of {norms[node]:.1e}")
            del replies[node], self.ledger.participants[node]
        return replies, sizes

    def pool(
        self,
        train: Step,
        combine: Callable[[Node, Any, Replies], Any],
        state: Tree,
        to: Sequence[str] | None = None,
        view: Callable[[Any, str], Any] | None = None,
    ) -> Tree:
        to = self._ordered(to)
        if self.topology.kind == "peers":
            if not isinstance(state, AtNodes):  # the first round: all begin alike, also who is not chosen or not there
                self.call(ADOPT, state, training=False)
            order = {"to": list(to), "view": view.__name__ if view else None}
            mail = self.call(StepName.spread(train.__name__), order, to)
            self.ledger.exchanges += 1
            self.call(StepName.gather(combine.__name__, self.robust), mail, to)
            return AtNodes()
        if self.topology.kind == "rotating":
            self._hand_over(state)
        message = Each({i: view(state, i) for i in to}) if view else state
        replies = self.call(StepName(train.__name__), message, to, alike=getattr(train, "alike", True))
        if not replies:
            self.ledger.failed(self.aggregator, combine.__name__, "no valid reply came back: the state stays as it was")
            return state
        self.ledger.exchanges += any(reply is not None for reply in replies.values())
        return self.hub(combine, state, robust(replies, self.robust))

    def _ordered(self, to: Sequence[str] | None) -> tuple[str, ...]:
        """Always in the order of the federation's ids, so that sums do not depend on who was named first."""
        wanted = set(self.ids if to is None else to)
        return tuple(i for i in self.ids if i in wanted)

    def _hand_over(self, state: Tree) -> None:
        """The state travels with the role."""
        if self.role and self.role != self.aggregator:
            self.ledger.letter(self.role, self.aggregator, wire.size(state))
        self.role = self.aggregator


def joined(found: Iterable[Tensor | None]) -> Tensor | None:
    """Outputs part by part as one, if there are any."""
    outputs = [part for part in found if part is not None]
    return torch.cat(outputs) if outputs else None


@dataclass
class Seen:
    """What a state was at one moment; equal if it has not changed since."""

    marks: list[Any]  # which tensors (and how often written to), which values, how they nest
    held: list[Any] = field(compare=False, repr=False)  # the tensors: an id is one's own only while one lives


def fingerprint(state: Tree) -> Seen:
    """Tells whether a state was changed."""
    if state == {}:
        return Seen([], [])
    found = list(trees.leaves(state))
    marks = [(p, id(v), v._version) if isinstance(v, torch.Tensor) else (p, v) for p, v in found]
    return Seen([*marks, trees.structure(state)], found)


def _difference(shape: tuple[Any, ...], usual: tuple[Any, ...]) -> str:
    extra = [s for s in shape[:-1] if s not in usual]
    lacks = [s for s in usual[:-1] if s not in shape]
    if extra:
        return f"{extra[0]} is not expected"
    return f"{lacks[0]} is missing" if lacks else "it nests otherwise"
