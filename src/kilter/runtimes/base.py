"""What all runtimes share: who takes part, whom a message reaches, what a reply must look like, what each topology pools.

A runtime says two things: `perform`, how a step is run at nodes, and `hub`, how one is run where aggregation happens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kilter import wire
from kilter.chance import derive
from kilter.core import SERVER, AtNodes, Each, Federation, Mail, Method, Node, Post, Replies, Step, Tree
from kilter.errors import Mistake
from kilter.ledger import Ledger
from kilter.runtimes.host import Done
from kilter.topology import topology


class Runtime(Federation):
    """A federation over some topology, up to how steps are performed."""

    def __init__(self, ids: Sequence[str], seed: int, spec: str) -> None:
        self.ids = tuple(ids)
        self.seed = seed
        self.round = 0
        self.topology = topology(spec, self.ids, seed)
        self.ledger = Ledger()
        self.role = ""  # who holds the aggregator's role (rotating)

    @abstractmethod
    def perform(self, name: str, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        """Run the step of this name at these nodes, each with its message."""

    def bind(self, method: Method) -> None:
        """Take up a method before its first step, on a clean page."""
        self.round, self.role, self.ledger = 0, "", Ledger()
        if "public" in method.needs and not self.has_public:
            raise Mistake(
                f"{type(method).__name__} gives the aggregator a small public data set: "
                "set public_per_class (--public 10) or give a file."
            )
        if "aggregator" in method.needs and self.topology.kind == "peers":
            raise Mistake(
                f"{type(method).__name__} needs one aggregator and so cannot run under '{self.topology.spec}': "
                "use the topology star or rotating."
            )

    @property
    def has_public(self) -> bool:
        return False

    def sample(self, cohort: float) -> tuple[str, ...]:
        if not 0 < cohort <= 1:
            raise Mistake(f"The cohort is a share of the nodes, above 0 and at most 1, not {cohort}.")
        k = max(1, round(cohort * len(self.ids)))
        if k == len(self.ids):
            return self.ids
        # Everyone draws a lot by name, so the same nodes are chosen whatever the order they are listed in.
        return self._ordered(sorted(self.ids, key=lambda i: derive(self.seed, self.round, i, "sample"))[:k])

    @property
    def aggregator(self) -> str:
        """The name of whoever aggregates in this round, where there is one."""
        return SERVER if self.topology.kind == "star" else self.topology.aggregator(self.round, self.ids)

    def map(self, step: Step, message: Tree = None, to: Sequence[str] | None = None) -> Any:
        return self.call(step.__name__, message, to)

    def call(self, name: str, message: Tree = None, to: Sequence[str] | None = None, training: bool = True) -> Any:
        """`map`, by the step's name; `training=False` books its traffic as evaluation's."""
        to = self._ordered(to)
        peers = self.topology.kind == "peers"
        if isinstance(message, Mail):
            messages: dict[str, Tree] = {i: message.box(i) for i in to}
        elif isinstance(message, Each):
            messages = {i: message[i] for i in to if i in message}
        else:
            messages = dict.fromkeys(to, message)
        if not peers and not isinstance(message, Mail):
            sizes: dict[int, int] = {}  # a broadcast is measured once
            for node, m in messages.items():
                size = sizes.setdefault(id(m), wire.size(m))
                self.ledger.letter(self.aggregator, node, size, training)
        done = self.perform(name, messages)
        replies = self._accept(name, {i: done[i] for i in to if i in done}, training)
        if any(isinstance(r, Post) for r in replies.values()):
            return self.deliver({i: r for i, r in replies.items() if isinstance(r, Post)}, name)
        if not peers:
            for node, reply in replies.items():
                self.ledger.letter(node, self.aggregator, wire.size(reply), training)
        return Replies(replies, of=len(self.ids))

    def deliver(self, posts: Mapping[str, Post], name: str) -> Mail:
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

    def _accept(self, name: str, done: Mapping[str, Done], training: bool) -> dict[str, Tree]:
        """Valid replies; the others go on record with a reason. Replies to one step have one shape: the commonest."""
        replies: dict[str, Tree] = {}
        for node, d in done.items():
            self.ledger.fitted(name.rpartition(":")[2], d.fits, d.seconds)
            if d.error is not None:
                self.ledger.failed(node, name, str(d.error))
            elif bad := wire.not_finite(d.reply):
                self.ledger.failed(node, name, f"its reply is not finite at {bad}")
            else:
                replies[node] = d.reply
                if training:
                    self.ledger.participants[node] = None
            self.ledger.notes += [{"node": node, "step": name, "note": text} for text in d.notes]
        shapes = {i: wire.signature(r) for i, r in replies.items() if training and not isinstance(r, Post)}
        if len(set(shapes.values())) > 1:
            usual = Counter(shapes.values()).most_common(1)[0][0]
            for node, shape in shapes.items():
                if shape != usual:
                    self.ledger.failed(
                        node, name, f"its reply has another shape than the others': {_difference(shape, usual)}"
                    )
                    del replies[node], self.ledger.participants[node]
        return replies

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
                self.call("adopt", state, training=False)
            order = {"to": list(to), "view": view.__name__ if view else None}
            mail = self.call(f"spread:{train.__name__}", order, to)
            self.call(f"gather:{combine.__name__}", mail, to)
            return AtNodes()
        if self.topology.kind == "rotating":
            self._hand_over(state)
        message = Each({i: view(state, i) for i in to}) if view else state
        replies = self.call(train.__name__, message, to)
        if not replies:
            self.ledger.failed(self.aggregator, combine.__name__, "no valid reply came back: the state stays as it was")
            return state
        return self.hub(combine, state, replies)

    def _ordered(self, to: Sequence[str] | None) -> tuple[str, ...]:
        """Always in the order of the federation's ids, so that sums do not depend on who was named first."""
        wanted = set(self.ids if to is None else to)
        return tuple(i for i in self.ids if i in wanted)

    def _hand_over(self, state: Tree) -> None:
        """The state travels with the role."""
        if self.role and self.role != self.aggregator:
            self.ledger.letter(self.role, self.aggregator, wire.size(state))
        self.role = self.aggregator


def _difference(shape: tuple[Any, ...], usual: tuple[Any, ...]) -> str:
    extra = [s for s in shape[:-1] if s not in usual]
    lacks = [s for s in usual[:-1] if s not in shape]
    if extra:
        return f"{extra[0]} is not expected"
    return f"{lacks[0]} is missing" if lacks else "it nests otherwise"
