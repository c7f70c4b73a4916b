"""FedMix. Yoon, Shin, Hwang, Yang: Approximation of Mixup under Mean Augmented Federated Learning (ICLR 2021), Alg. 2."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, alone, step
from kilter.options import option
from kilter.params import average

Means = dict[str, Tensor]  # "x", "y": one row for each mean


class State(TypedDict):
    w: Params
    means: Means  # of all nodes
    has: list[str]  # the nodes that have received them


@dataclass(frozen=True, kw_only=True)
class FedMix(Method):
    """Mixup without sharing rows: nodes exchange, once, means (xbar, ybar) of several of their rows, and train on

    (1-lam) l(f(x'), y) + lam l(f(x'), ybar) + lam <d l(f(x'), y)/dx', xbar>,  x' = (1-lam) x,
    which is the mixup loss l(f(x' + lam xbar), ...) up to lam^2. Every row gets a random mean, a new one in each round. The last
    term is the derivative of each row's own loss, averaged over rows. l must be linear in y.
    Keeps: everyone's means.  Sends: once, means of at least `mash` of its rows; its model and how many rows it trained on.
    """

    lam: float = option(0.1, "Share of the mean in the mixture; 0 is FedAvg.", at_least=0, at_most=1)
    mash: int = option(16, "Fewest rows in a shared mean, for privacy; all rows if a node has fewer.", at_least=1)

    sends = frozenset({"model", "means", "counts"})
    states_average = False
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it mixes one-hot labels"
    mixes_rows = False

    def setup(self, fed: Federation) -> State:
        state: State = {"w": self.task.init(fed.seed), "means": {}, "has": []}
        return fed.pool(self.average_rows, self.collect, state, view=self.nothing)

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def discloses(self) -> frozenset[str]:
        return self.sends | {"rows"} if self.mash < 2 else self.sends  # the mean of one row is that row

    def nothing(self, state: State, _: str) -> None:
        return None

    def view(self, state: State, node: str) -> tuple[Params, Means]:
        """The model, and the means for a node that does not have them."""
        return state["w"], {} if node in state["has"] else state["means"]

    @step(alike=False)
    def average_rows(self, node: Node, _: None) -> Means:
        return self.mashed(node)

    @step
    def collect(self, hub: Node, state: State, replies: Replies) -> State:
        return state | {"means": {k: torch.cat([r[k] for r in replies.values()]) for k in ("x", "y")}}

    @step
    def train(self, node: Node, state: tuple[Params, Means]) -> Generator[Fit, Params, tuple[Params, int]]:
        w, means = state
        if means:
            node.state["means"] = means
        if "means" not in node.state:
            node.notice("received no means of others: mixes with its own")
        rows, means = node.data.train, node.state.get("means") or self.mashed(node)
        drawn = torch.randint(len(means["x"]), (len(rows),), generator=node.rng)
        w = yield node.fit(self.loss, w, self.local, xbar=means["x"][drawn], ybar=means["y"][drawn])
        return w, len(rows)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        has = [*state["has"], *(i for i in replies if i not in state["has"])]
        return state | {"w": average(replies.values()), "has": has}

    @alone
    def loss(self, w: Params, batch: Batch, _: None) -> Tensor:
        x = ((1 - self.lam) * self.task.augmented(batch["x"])).requires_grad_()
        out = self.task.outputs(w, x, training=True)
        own = self.task.rows_loss(out, batch["y"])
        (slope,) = torch.autograd.grad(own.sum(), x, create_graph=True)  # row by row: d own_i / dx_i
        mixed = (1 - self.lam) * own + self.lam * self.task.rows_loss(out, batch["ybar"])
        return mixed.mean() + self.lam * (slope * batch["xbar"]).flatten(1).sum(1).mean()

    def mashed(self, node: Node) -> Means:
        """Means of this node's rows, in random groups of `mash` rows or slightly more."""
        x, y = node.data.train["x"], self.soft(node.data.train)
        parts = torch.randperm(len(x), generator=node.rng).tensor_split(max(1, len(x) // self.mash))
        return {name: torch.stack([v[p].mean(0) for p in parts]) for name, v in (("x", x), ("y", y))}

    def shared(self, state: State) -> Tree:
        return {"w": state["w"]}

    def soft(self, rows: Rows) -> Tensor:
        """Labels that can be averaged: one-hot for classes, unchanged for numbers."""
        y = rows["y"]
        if y.is_floating_point():
            return y
        classes = self.task.predict(self.task.init(0), rows.batch(slice(0, 1))["x"]).shape[1]
        return one_hot(y, classes).float()

    def model(self, state: State) -> Params:
        return state["w"]
