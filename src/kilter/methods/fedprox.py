"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks (MLSys 2020), Alg. 2."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, step
from kilter.options import option
from kilter.params import average, sq_norm, sub, weights


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """FedAvg with a proximal term that keeps local models near the received one: F_k(w) + mu/2 |w - w^t|^2 (weights only).

    Keeps: nothing.  Sends: its model, and how many rows it trained on.
    """

    mu: float = option(0.01, "Strength of the proximal term; 0 is FedAvg.", at_least=0)

    sends = frozenset({"model", "counts"})

    def setup(self, fed: Federation) -> Params:
        return self.task.init(fed.seed)

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        w = yield node.fit(self.loss, w, self.local, ctx=weights(w))
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Batch, anchor: Params) -> Tensor:
        return self.task.loss(w, batch) + self.mu / 2 * sq_norm(sub(anchor, w))
