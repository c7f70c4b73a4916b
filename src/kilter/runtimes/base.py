"""What all runtimes share: sampling, delivery of messages, checks on replies, and pooling under each topology.

A runtime implements one function, `execute`: run the named step at these nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilter import trees
from kilter.blocks.server_optimiser import optimised
from kilter.core import (
    SERVER,
    AtNodes,
    Data,
    Each,
    Federation,
    Mail,
    Method,
    Node,
    Params,
    Post,
    Replies,
    Rows,
    Step,
    Tree,
    Unread,
)
from kilter.errors import Mistake, unknown
from kilter.fast import placement, switch
from kilter.records import wire
from kilter.runtimes import devices
from kilter.runtimes.evaluation import parts, predict_part
from kilter.runtimes.groups import pool_in_groups
from kilter.runtimes.ledger import Ledger
from kilter.runtimes.needs import check_needs
from kilter.runtimes.reply_checks import Shape, oversized
from kilter.runtimes.robust import robust
from kilter.runtimes.roles import Roles
from kilter.runtimes.step_names import ADOPT, StepName
from kilter.runtimes.step_runner import Absent, Done, reason, run_step, step_failed
from kilter.seeds import derive_each
from kilter.topology import topology

AGGREGATE = "aggregate"  # the name under which the absence of a rotating aggregator is looked up
NOTHING = Rows({}, torch.empty(0, dtype=torch.int64))


class Runtime(Federation):
    """A federation over some topology. Subclasses say how steps run.

    `bench` is the common test set; `public` holds the rows that the aggregator may use.
    """

    exhibits = True  # whether its nodes record what they exhibit

    def __init__(
        self, ids: Sequence[str], seed: int, spec: str, bench: Rows | None = None, public: Rows | None = None
    ) -> None:
        self.ids = tuple(ids)
        self.seed = seed
        self.round = 0
        self.topology = topology(spec, self.ids, seed)
        self.ledger = Ledger()
        self.opening = Ledger()  # the letters before the method's set-up: statistics for the preparation of data
        self.role = ""  # the node that aggregates, or aggregated last (rotating)
        self._roles = Roles()
        self.leaderless: str | None = None  # why nobody can aggregate in this round (rotating)
        self.robust = ""  # the rule for robust aggregation (kilter.runtimes.robust)
        self.private_seed: int | None = None  # for the secrets of the node that lives here; None in a simulation
        self.devices: tuple[torch.device, ...] = (placement.CPU,)
        self.device, self.precision = placement.CPU, "fp32"
        self.plain = False  # whether accelerated code (kilter.fast) is switched off
        self.stack_width = 1  # clients that train in one stack, at most
        self.clients: dict[str, Data] = {}  # data of the nodes that live in this process
        self.bench = bench
        self.public = public
        self.states: dict[str, dict[str, Tree]] = {}  # states of the nodes that live here, the aggregator's included
        self.changed: set[str] = set()  # nodes whose state is newer than the last checkpoint
        self.shared: dict[str, int] = {}  # how many processes last shared each step

    @property
    def roles(self) -> Roles:
        """Roles of nodes by name (rotating and aggregators:k)."""
        return self._roles

    @roles.setter
    def roles(self, roles: Roles) -> None:
        self._roles = roles
        if aggregators := roles.group_aggregators(self.topology.spec, self.ids):
            self.topology = topology(self.topology.spec, self.ids, self.seed, aggregators)

    def set_device(self, spec: str, precision: str = "fp32") -> None:
        """Compute fits and predictions on this device (or these, shared by workers), with layers in this precision."""
        if precision not in devices.PRECISIONS:
            raise unknown("precision", precision, devices.PRECISIONS)
        self.devices, self.precision = devices.parse(spec), precision
        self.device = self.devices[0]
        if precision == "tf32" and self.device.type != "cuda":
            raise Mistake(f"--precision tf32 needs a cuda device, and this run is on {self.device}: use fp32 or bf16.")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside this block, computations use the device, precision and acceleration of this run."""
        with switch.plain(self.plain), devices.repeatable(self.device, self.precision):
            yield

    @abstractmethod
    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        """Run the named step at these nodes, each with its message."""

    def bind(self, method: Method) -> None:
        """Prepare for a method: clear all state and check what the method needs."""
        self.round, self.role, self.leaderless, self.ledger = 0, "", None, Ledger(proxy=self.roles.proxy)
        self.states, self.changed = {}, set()
        check_needs(self, method)

    @property
    def has_public(self) -> bool:
        return self.public is not None

    def hub(self, step: Callable[..., Tree], *messages: Tree) -> Tree:
        if self.topology.kind == "peers":
            raise Mistake(
                f"This method needs one aggregator and so cannot run under '{self.topology.spec}': use star or rotating."
            )
        hub = self.node(self.aggregator, StepName(step.__name__), self.round, self.states.setdefault(SERVER, {}))
        before = fingerprint(hub.state)
        with self.computing():
            (done,) = run_step(lambda node, _: step(node, *messages), [hub], [None])
        if done.error is not None:
            raise step_failed(hub.step, "the aggregator", done.error)
        if fingerprint(hub.state) != before:
            self.changed.add(SERVER)
        self.ledger.fitted(hub.step, done.fits, done.seconds)
        for note in done.notes:
            self.ledger.note(hub.id, hub.step, note)
        return done.reply

    def node(self, name: str, step: StepName, round: int, state: dict[str, Tree]) -> Node:
        """The node as its step sees it."""
        peers = self.topology.neighbours.get(name, ())
        data = self.clients.get(name, Data(NOTHING, NOTHING, NOTHING))
        aggregates = self.topology.kind != "star" or name == SERVER  # now or in a later round
        public = self.public if aggregates else None
        # `spread:train` draws the same random numbers as `train`, so peers over a full graph give the star's results.
        node = Node(name, data, self.seed, round, step.step, state, peers, public, self.bench, exhibits=self.exhibits)
        node.private_seed = self.private_seed
        node.group, node.aggregators = self.topology.group(name), tuple(self.topology.groups)
        return node

    def label_counts(self) -> dict[str, list[int]]:
        """By client: its training rows of each class; empty where a client lives elsewhere or rows have no classes."""
        labels = {name: data.train["y"] for name, data in self.clients.items() if "y" in data.train.tables}
        if len(labels) < len(self.ids) or any(y.ndim != 1 or y.is_floating_point() for y in labels.values()):
            return {}
        classes = max((int(y.max()) + 1 for y in labels.values() if len(y)), default=0)
        return {name: torch.bincount(y.long(), minlength=classes).tolist() for name, y in labels.items()}

    def look(self, method: Method, state: Tree) -> Tensor | None:
        """The global model's outputs on the common test set; None without a global model."""
        assert self.bench is not None
        return joined(predict_part(method, state, self.bench, part) for part in range(parts(self.bench)))

    def distribute(
        self, method: Method, state: Tree, best: Params | None, card: str, to: Sequence[str] | None = None
    ) -> list[str]:
        """Give the final models to the sites of a deployed run; who has received them. A simulation keeps them itself."""
        return []

    def after(self, round: int) -> int:
        """The next round. A participant that was away skips to the round of the others."""
        return round + 1

    def sample(self, cohort: float) -> tuple[str, ...]:
        if not 0 < cohort <= 1:
            raise Mistake(f"The cohort is a share of the nodes: above 0 and at most 1, not {cohort}.")
        k = max(1, round(cohort * len(self.ids)))
        if k == len(self.ids):
            return self.ids
        # Every node draws by name, so the choice does not depend on the order of the list.
        lots = derive_each([self.seed, self.round], self.ids, "sample")
        return tuple(self.ids[i] for i in sorted(lots.argsort(kind="stable")[:k]))

    @property
    def aggregator(self) -> str:
        """The node that aggregates in this round, for topologies with one aggregator."""
        if self.topology.kind == "star":
            return SERVER
        return self.role or self.topology.aggregator(self.round, self.roles.aggregators(self.ids))

    def begin_round(self, last: int, state: Tree, best: Params | None = None) -> None:
        """Enter the round after `last`. A rotating aggregator hands the state, and what it remembers, to the next one.

        `best`, the model of the best round so far, moves with them; it is traffic of the evaluation.
        """
        self.round = self.after(last)
        if self.topology.kind == "rotating":
            before, self.role = self.role, self.choose_aggregator()
            if before:
                self.ledger.letter(before, self.role, hand_over_size(state, self.states.get(SERVER, {})))
                self.ledger.letter(before, self.role, 0 if best is None else wire.size(best), training=False)

    def choose_aggregator(self) -> str:
        """Whose turn it is to aggregate. Turns skip nodes that are absent."""
        turns = self.topology.turns(self.round, self.roles.aggregators(self.ids))
        for name in turns:
            self.leaderless = self.absence(name, AGGREGATE)
            if not self.leaderless:
                return name
            self.ledger.failed(name, AGGREGATE, f"{self.leaderless}: its turn to aggregate is skipped")
        return turns[0]

    def map(self, step: Step, message: Tree = None, to: Sequence[str] | None = None) -> Tree:
        return self.call(StepName(step.__name__), message, to, alike=getattr(step, "alike", True))

    def call(
        self,
        name: StepName,
        message: Tree = None,
        to: Sequence[str] | None = None,
        training: bool = True,
        alike: bool = True,
    ) -> Tree:
        """`map`, by the step's name. `training=False` counts the traffic as evaluation; `alike`: replies must have one shape."""
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
        """Sort letters by receiver. A letter to a node that is not a neighbour is a bug in the method."""
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
        """Valid replies and their sizes in bytes. The others are recorded with a reason.

        Where replies must have one shape, the most common one counts, and no norm may be far above the median.
        """
        step = str(name)
        replies: dict[str, Tree | Unread] = {}
        sizes: dict[str, int] = {}
        shapes: dict[str, Shape] = {}
        norms: dict[str, float] = {}
        for node, d in done.items():
            self.ledger.fitted(name.step, d.fits, d.seconds)
            if d.error is not None:
                self.ledger.failed(node, step, reason(d.error), "absent" if isinstance(d.error, Absent) else "error")
            elif (seen := d.seen or wire.facts(d.reply)).bad:
                self.ledger.failed(node, step, f"its reply is not finite at {seen.bad}", "not finite")
            else:
                replies[node] = d.kept
                if not isinstance(d.kept, Post):
                    sizes[node] = seen.size
                    if alike:
                        shapes[node], norms[node] = seen.signature, seen.norm
                if training:
                    self.ledger.participants[node] = None
            for note in d.notes:
                self.ledger.note(node, step, note)
        if len(set(shapes.values())) > 1:
            usual = Counter(shapes.values()).most_common(1)[0][0]
            for node, shape in shapes.items():
                if shape != usual:
                    why = f"its reply differs in shape from the others: {_difference(shape, usual)}"
                    self.ledger.failed(node, step, why, "shape")
                    del replies[node], norms[node], self.ledger.participants[node]
        for node in oversized(norms):
            why = f"its reply is far too large: a norm of {norms[node]:.1e}"
            self.ledger.failed(node, step, why, "too large")
            del replies[node], self.ledger.participants[node]
        self.ledger.replies += sum(map(_carries, replies.values())) if training else 0
        return replies, sizes

    def pool(
        self,
        train: Step,
        combine: Callable[[Node, Tree, Replies], Tree],
        state: Tree,
        to: Sequence[str] | None = None,
        view: Callable[[Tree, str], Tree] | None = None,
    ) -> Tree:
        to = self._ordered(to)
        if self.topology.groups:
            return pool_in_groups(self, train, combine, state, to, view)
        if self.topology.kind == "peers":
            if not isinstance(state, AtNodes):  # first round: every node starts from this state, chosen or not
                self.call(ADOPT, state, training=False)
            order = {"to": list(to), "view": view.__name__ if view else None}
            mail = self.call(StepName.spread(train.__name__), order, to)
            self.ledger.exchanges += 1
            self.call(StepName.gather(combine.__name__, self.robust), mail, to)
            return AtNodes()
        message = Each({i: view(state, i) for i in to}) if view else state
        replies = self.call(StepName(train.__name__), message, to, alike=getattr(train, "alike", True))
        if not replies:
            why = "no valid reply: the state is unchanged"
            self.ledger.failed(self.aggregator, combine.__name__, why, "no replies")
            return state
        self.ledger.exchanges += any(reply is not None for reply in replies.values())
        if self.leaderless:
            self.ledger.failed(self.aggregator, combine.__name__, f"{self.leaderless}: the state is unchanged")
            return state
        return self.hub(optimised(combine), state, robust(replies, self.robust))

    def absence(self, node: str, step: str) -> str | None:
        """Why a node cannot run this step; None if it can."""
        return None

    def _ordered(self, to: Sequence[str] | None) -> tuple[str, ...]:
        """In the order of the federation's ids, so that sums do not depend on the order of the request."""
        wanted = set(self.ids if to is None else to)
        return tuple(i for i in self.ids if i in wanted)


def hand_over_size(state: Tree, memory: Tree) -> int:
    """The bytes of a hand-over from one aggregator to the next: the state, and what the aggregator remembers."""
    return wire.size(state) + (wire.size(memory) if memory else 0)


def joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The parts as one tensor; None if there are none."""
    outputs = [part for part in parts if part is not None]
    return torch.cat(outputs) if outputs else None


@dataclass
class Fingerprint:
    """A state at one moment. Two fingerprints are equal if the state has not changed in between."""

    marks: list[object]  # identity and version of tensors, plain values, structure
    held: Sequence[object] = field(
        compare=False, repr=False
    )  # keeps the tensors alive, because ids are unique only among live objects


def fingerprint(state: Tree) -> Fingerprint:
    """A fingerprint that shows whether a state changes."""
    if state == {}:
        return Fingerprint([], [])
    leaves = list(trees.leaves(state))
    marks = [(p, id(v), v._version) if isinstance(v, torch.Tensor) else (p, v) for p, v in leaves]
    return Fingerprint([*marks, trees.structure(state)], leaves)


def _carries(reply: Tree | Unread) -> bool:
    """Whether a reply carries anything."""
    return bool(reply) if isinstance(reply, Post) else reply is not None


def _difference(shape: Shape, usual: Shape) -> str:
    extra = [s for s in shape[:-1] if s not in usual]
    missing = [s for s in usual[:-1] if s not in shape]
    if extra:
        return f"{extra[0]} is not expected"
    return f"{missing[0]} is missing" if missing else "the nesting differs"
