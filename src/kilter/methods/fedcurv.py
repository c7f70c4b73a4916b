"""FedCurv. Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: Overcoming Forgetting in FL (2019), section 3."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from kilter.blocks.fisher import fisher
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import add, apply, average, dot, scale, sub, weights, zeros


class State(TypedDict):
    w: Params
    U: Params  # sum_j I_j
    V: Params  # sum_j I_j theta_j
    whose: list[str]  # the nodes j
    round: int  # in which they sent them


@dataclass(frozen=True, kw_only=True)
class FedCurv(Method):
    """FedAvg with a penalty that keeps local models near those of the other nodes, weighted by the curvature of their losses:

    F_k(theta) + lam sum_{j != k} (theta - theta_j)' diag(I_j) (theta - theta_j) = F_k + lam [theta' U theta - 2 theta' V] + const
    with U = sum_j I_j and V = sum_j I_j theta_j over the other participants of the last round. I_j is the diagonal of the Fisher
    information, the mean over rows of squared gradients. Round 1 has no penalty. Weights only, no buffers.
    Keeps: its own part of U and V, to subtract it.  Sends: its model, I_k, I_k theta_k (3 x FedAvg), and its number of rows.
    """

    lam: float = option(0.01, "Strength of the penalty; 0 is FedAvg.", at_least=0)

    tasks = frozenset({"multi-class", "binary", "text", "multi-label", "regression", "segmentation", "next-token"})
    tasks_reason = "its Fisher information needs a loss of single rows, and Cox's loss compares rows"
    sends = frozenset({"model", "sums", "counts"})
    states_average = False

    def setup(self, fed: Federation) -> State:
        w = self.task.init(fed.seed)
        return {"w": w, "U": zeros(weights(w)), "V": zeros(weights(w)), "whose": [], "round": 0}

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, state: State) -> Generator[Fit, Params, tuple[Params, Params, Params, int]]:
        others = state["U"], state["V"]
        if node.id in state["whose"] and node.state.get("round") == state["round"]:
            others = sub(others[0], node.state["I"]), sub(others[1], node.state["It"])
        w = yield node.fit(self.loss, state["w"], self.local, ctx=others)
        i = fisher(self.task, w, node.data.train)
        node.state.update({"round": node.round, "I": i, "It": apply(torch.mul, i, w)})
        return w, i, node.state["It"], len(node.data.train)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        u, v = zeros(state["U"]), zeros(state["V"])
        for _, i, it, _ in replies.values():
            u, v = add(u, i), add(v, it)
        w = average((w, n) for w, _, _, n in replies.values())
        return {"w": w, "U": u, "V": v, "whose": list(replies), "round": hub.round}

    def loss(self, theta: Params, batch: Batch, others: tuple[Params, Params]) -> Tensor:
        return self.task.loss(theta, batch) + self.lam * self.penalty(theta, *others)

    def penalty(self, theta: Params, u: Params, v: Params) -> Tensor:
        """theta' U theta - 2 theta' V: the penalty up to a constant."""
        return dot(sub(apply(torch.mul, u, theta), scale(v, 2)), theta)

    def model(self, state: State) -> Params:
        return state["w"]

    def shared(self, state: State) -> Tree:
        return {"w": state["w"]}
