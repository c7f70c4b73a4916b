"""The vocabulary a method is written in: Node, Fit, step, Post, Mail, Replies, Federation, Method.

A round is a chain of `fed.map(step, message)` calls. A step is a function of one node. It may `yield` one kind of heavy work, a
`Fit`. What it returns is all that leaves the node. A runtime implements `map`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor

from kilter.options import check, option
from kilter.seeds import derive, generator

if TYPE_CHECKING:
    from kilter.blocks.server_optimiser import ServerOptimiser
    from kilter.tasks import Task
    from kilter.train import Plan

Params = dict[str, Tensor]  # a model: a flat dict; names of buffers start with "~" (see kilter.params)
Batch = dict[str, Tensor]  # "x", "y" and whatever columns a step added
Tree = Any  # nested dict/list/tuple of tensors and plain values: what may be kept, sent and checkpointed
Loss = Callable[[Params, Batch, Tree], Tensor]

Note = str | dict[str, object]  # plain values, as they travel: made by Node.note, notice, record, listened and exhibit

SERVER = "server"

DISCLOSURES = {  # what a method may send from a node: the kinds that `Method.sends` declares and a site's policy allows
    "model": "model weights trained on the node's rows, all of them or a part",
    "density": "a model of how the node's inputs are distributed",
    "sums": "sums or averages over the node's rows, such as gradients, squared gradients or losses",
    "counts": "how many rows the node trained on",
    "label_counts": "how many rows of each class the node has, or which classes it has",
    "means": "averages of several rows each",
    "prototypes": "the average features of each class",
    "pictures": "artificial rows drawn from a generator that was trained on the node's rows",
    "opinions": "how much the node trusts other nodes",
    "shares": "secret shares of the model, which reveal only sums over several nodes",
    "predictions": "the model's outputs on public rows",
    "statistics": "counts, means and deviations of columns or colour channels, and category values that several rows have",
    "rows": "the node's raw rows",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of shared tables. Tables are loaded once; each node has only its own row numbers."""

    tables: Mapping[str, Tensor]  # "x": (N, ...), "y": (N,), ...
    index: Tensor  # int64 (n,): the row numbers
    own: Mapping[str, Tensor] = field(default_factory=dict)  # extra columns of this node, (n, ...)

    @staticmethod
    def of(**tables: Tensor) -> Rows:
        """All rows of these tables."""
        return Rows(tables, torch.arange(len(next(iter(tables.values())))))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, column: str) -> Tensor:
        """One column, gathered: `rows["y"]`."""
        return self.own[column] if column in self.own else as_float(self.tables[column].index_select(0, self.index))

    def gathered_bytes(self, column: str) -> int:
        """How many bytes a column takes when it is gathered."""
        if column in self.own:
            return self.own[column].nbytes
        table = self.tables[column]
        return len(self) * table[:1].numel() * (4 if table.dtype == torch.uint8 else table.element_size())

    def batch(self, at: Tensor | slice = slice(None)) -> Batch:
        """The rows at these positions (of `index`) with every column; bytes become floats in 0..1."""
        rows = self.index[at]
        # index_select copies whole rows, which is three times as fast as table[rows]
        shared = {name: as_float(table.index_select(0, rows)) for name, table in self.tables.items()}
        return shared | {name: column[at] for name, column in self.own.items()}

    def take(self, at: Tensor) -> Rows:
        """A subset: the rows at these positions."""
        return Rows(self.tables, self.index[at], {name: column[at] for name, column in self.own.items()})

    def extend(self, **columns: Tensor) -> Rows:
        """The same rows with extra columns, one entry for each row."""
        for name, column in columns.items():
            if len(column) != len(self):
                raise ValueError(f"column {name!r} has {len(column)} entries for {len(self)} rows")
        return replace(self, own={**self.own, **columns})


def as_float(column: Tensor) -> Tensor:
    """Images are stored as bytes and used as floats in 0..1."""
    return column.float().div_(255) if column.dtype == torch.uint8 else column


@dataclass(frozen=True, eq=False)
class Data:
    """The data of one node. It never leaves the node."""

    train: Rows
    valid: Rows
    test: Rows


@dataclass(frozen=True, eq=False)
class Fit:
    """A request to train. A step yields it; the runtime runs it: here, in another process, or stacked with other fits."""

    loss: Loss
    params: Params
    rows: Rows
    plan: Plan
    seed: int  # of batch order and dropout
    ctx: Tree = None  # constants for the loss: data instead of closures, so that fits can be stacked
    train: frozenset[str] | None = None  # names to train; None: every weight


@dataclass
class Node:
    """One participant, as its steps see it. The runtime keeps `state` between rounds."""

    id: str
    data: Data
    seed: int = 0
    round: int = 0
    step: str = ""
    state: dict[str, Tree] = field(default_factory=dict)
    peers: tuple[str, ...] = ()  # the nodes it may write to
    public: Rows | None = None  # rows that the aggregator may use
    bench: Rows | None = None  # the common test set, if there is one
    fits: int = 0  # how many fits this step has requested
    notes: list[Note] = field(default_factory=list)  # for the round's record; never data, except exhibits
    exhibits: bool = False  # whether `exhibit` records anything; never at a real site
    private_seed: int | None = None  # of a real site: drawn from the operating system once, and never sent
    group: tuple[str, ...] = ()  # where several nodes aggregate: its group, the aggregator first
    aggregators: tuple[str, ...] = ()  # where several nodes aggregate: those of all groups

    @property
    def rng(self) -> torch.Generator:
        """A new generator for (seed, round, node, step). Keep it in a variable to draw more than once."""
        return generator(self.seed, self.round, self.id, self.step)

    @property
    def secret_seed(self) -> int:
        """The seed of random numbers that other nodes must not be able to compute.

        At a real site it comes from the operating system and is kept in the site's state directory, so that a resumed run repeats
        it. In a simulation, where nobody attacks, it is the run's seed, so that runs repeat.
        """
        return self.seed if self.private_seed is None else self.private_seed

    def note(self, text: str) -> None:
        """Add a sentence to the round's record."""
        self.notes.append(text)

    def notice(self, what: str) -> None:
        """Say that something did not happen as the method intends.

        The run's end, its summary and a study's tables count equal notices, so leave out numbers and names of nodes.
        """
        self.notes.append({"notice": what})

    def record(self, series: str, value: float, at: int | None = None) -> None:
        """Add a point to a named series, at this round or at a number of your own. Studies draw every series."""
        self.notes.append({"series": series, "value": float(value), "at": self.round if at is None else at})

    def listened(self, weights: Mapping[str, float]) -> None:
        """Record how much of others' models this node took, {peer: weight}; its own model has weight 1."""
        self.notes.append({"listens": dict(weights)})

    def exhibit(self, name: str, values: Tensor | Mapping[str, float]) -> None:
        """Show values in the run's report: numbers by name, one number for each training row, or pictures (n, channels, h, w).

        This may show rows, so it does nothing at a real site. A simulation and an aggregator record it.
        """
        if self.exhibits:
            self.notes.append({"exhibit": name, "values": values})

    def fit(
        self,
        loss: Loss,
        params: Params,
        plan: Plan,
        ctx: Tree = None,
        *,
        rows: Rows | None = None,
        train: Iterable[str] | None = None,
        **columns: Tensor,
    ) -> Fit:
        """Request training on this node's rows. `columns` (one entry for each row) are added to every batch."""
        rows = self.data.train if rows is None else rows
        self.fits += 1
        return Fit(
            loss,
            params,
            rows.extend(**columns) if columns else rows,
            plan.at(self.round),
            derive(self.seed, self.round, self.id, self.step, self.fits),
            ctx,
            None if train is None else frozenset(train),
        )


class Post(dict[str, Tree]):
    """Letters from one node to others: {peer: letter}."""


class Mail:
    """Letters in transit. A round passes them on unread; the runtime delivers each node its own."""

    def __init__(self, letters: Mapping[str, Mapping[str, Tree]]) -> None:
        self._letters = {to: dict(box) for to, box in letters.items()}  # {receiver: {sender: letter}}

    def box(self, receiver: str) -> dict[str, Tree]:
        """The letters to one node: {sender: letter}."""
        return self._letters.get(receiver, {})


class Each(dict[str, Tree]):
    """A message that differs by node: {node: message}."""


class AtNodes:
    """Stands for a state that every node keeps itself (peers). The runtime replaces it by the node's own state."""


@dataclass(frozen=True, eq=False)
class Unread:
    """A reply on disk. `read` loads it."""

    read: Callable[[], Tree]


class Replies(Mapping[str, Tree]):
    """The replies of the nodes, in the order of the federation's ids.

    Large replies are on disk and are loaded on access: a loop over `values()` holds one at a time.
    """

    def __init__(self, replies: Mapping[str, Tree | Unread], of: int) -> None:
        self._replies = dict(replies)
        self.of = of  # how many nodes the aggregator serves, present or not

    def __getitem__(self, node: str) -> Tree:
        reply = self._replies[node]
        return reply.read() if isinstance(reply, Unread) else reply

    def __iter__(self) -> Iterator[str]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def __ror__(self, known: dict[str, Tree]) -> dict[str, Tree]:
        """Known values, updated by the replies."""
        return {**known, **self}

    def __repr__(self) -> str:
        return f"Replies({self._replies}, of={self.of})"


Step = Callable[[Node, Tree], Tree]
F = TypeVar("F", bound=Callable[..., object])


@overload
def step(function: F) -> F: ...
@overload
def step(*, alike: bool) -> Callable[[F], F]: ...
def step(function: Any = None, *, alike: bool = True) -> Any:
    """Mark a function that runs at a node. Its return value is all that leaves the node: read it to audit a method.

    Do not reuse a value after returning it. To keep something, store it in `node.state`. Replies must have one shape; use
    `@step(alike=False)` where they rightly differ, for example in the number of rows.
    """

    def mark(f: Any) -> Any:
        f.is_step, f.alike = True, alike
        return f

    return mark if function is None else mark(function)


def alone(loss: F) -> F:
    """Mark a loss that computes gradients itself. Its fits are never stacked."""
    loss.alone = True  # type: ignore[attr-defined]
    return loss


class Federation(ABC):
    """The participants, as a method's round sees them."""

    ids: tuple[str, ...]
    seed: int
    round: int
    rounds: int = 1  # in the whole run

    @abstractmethod
    def sample(self, cohort: float) -> tuple[str, ...]:
        """The participants of this round: a share of the nodes (0 < cohort <= 1), at least one."""

    @abstractmethod
    def map(self, step: Step, message: Tree = None, to: Sequence[str] | None = None) -> Tree:
        """Run a step at these nodes (default: all). Returns Replies, or Mail if the nodes wrote letters (Post)."""

    @abstractmethod
    def hub(self, step: Callable[..., Tree], *messages: Tree) -> Tree:
        """Run a step at the aggregator. Returns what the step returns."""

    @abstractmethod
    def pool(
        self,
        train: Step,
        combine: Callable[[Node, Tree, Replies], Tree],
        state: Tree,
        to: Sequence[str] | None = None,
        view: Callable[[Tree, str], Tree] | None = None,
    ) -> Tree:
        """Nodes train, the aggregator combines. The topology decides who aggregates. Returns the new state.

        `view(state, id)` is the part of the state that one node receives (default: all of it).
        """


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A federated method: a frozen dataclass whose fields are its hyper-parameters."""

    task: Task
    local: Plan  # how a node trains
    cohort: float = option(1.0, "Share of the nodes that take part in a round.", above=0, at_most=1)
    server: ServerOptimiser | None = None  # moves the averaged model (kilter.blocks.server_optimiser)

    needs: ClassVar[frozenset[str]] = frozenset()  # of {"public", "aggregator", "everyone"}, checked before a run
    pools: ClassVar[bool] = True  # whether it combines models with `fed.pool`, so that --robust and --server apply
    states_average: ClassVar[bool] = True  # whether the mean of states of two groups is a state (aggregators:k)
    sends: ClassVar[frozenset[str]] = frozenset({"rows"})  # what leaves a node (DISCLOSURES); undeclared: the worst

    tasks: ClassVar[frozenset[str]] = frozenset()  # what it can learn (kilter.tasks.kinds); empty: everything
    tasks_reason: ClassVar[str] = ""  # why not the others
    mixes_rows: ClassVar[bool] = True  # whether its loss is the task's, so that mixup applies

    def __post_init__(self) -> None:
        check(self, type(self).__name__)
        if not self.mixes_rows:
            self.task.refuse_mixup(type(self).__name__)

    @abstractmethod
    def setup(self, fed: Federation) -> Tree:
        """Everything before the first round. Returns the initial state."""

    @abstractmethod
    def round(self, fed: Federation, state: Tree) -> Tree:
        """One round. Returns the next state."""

    def discloses(self) -> frozenset[str]:
        """What leaves a node with these settings; `sends`, unless a setting changes it."""
        return self.sends

    def model(self, state: Tree) -> Params | None:
        """The global model in this state; None if the method has none."""
        params: Params = state
        return params

    def predict(self, state: Tree, x: Tensor) -> Tensor | None:
        """Outputs of the global model, row by row; None if the method has none."""
        model = self.model(state)
        return None if model is None or self.task.personal else self.task.predict(model, x)

    def variants(self, state: Tree) -> dict[str, Callable[[Tensor], Tensor]]:
        """Other models to report besides the global one: name -> function from x to outputs."""
        return {}

    def shared(self, state: Tree) -> Tree:
        """The part of the state that nodes need to evaluate `predict` and `personal` (default: all of it)."""
        return state

    def personal_model(self, node: Node, state: Tree) -> Params | None:
        """This node's own model; None if it uses the global one, or if its model is more than one network."""
        return None

    def personal(self, node: Node, state: Tree, x: Tensor) -> Tensor | None:
        """Outputs of this node's own model; None if it uses the global one."""
        own = self.personal_model(node, state)
        return None if own is None else self.task.predict(own, x)

    def never_happened(self, state: Tree) -> list[str]:
        """What the method intends and, judging by its final state, never did: notices for the whole run."""
        return []

    def depends_on_rounds(self) -> bool:
        """Whether training depends on how many rounds the run has (`fed.rounds`), so that a finished run cannot be extended."""
        return False
