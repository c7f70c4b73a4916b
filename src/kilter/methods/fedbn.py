"""FedBN. Li, Jiang, Zhang, Kamp, Dou: Federated Learning on Non-IID Features via Local Batch Normalization (ICLR 2021), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.params import average, drop, pick


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """FedAvg of all layers except BatchNorm layers (selected by module type), which stay at the node with their statistics.

    There is no global model. A node is evaluated with its own BatchNorm layers; one that never trained, with the initial ones.
    Keeps: its BatchNorm layers.  Sends: the rest of its model, and how many rows it trained on.
    """

    sends = frozenset({"model", "counts"})

    def setup(self, fed: Federation) -> Params:
        return drop(self.task.init(fed.seed), self.task.named(_BatchNorm))

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        own = self.task.named(_BatchNorm)
        w = yield node.fit(self.loss, self.whole(node, w), self.local)
        node.state["bn"] = pick(w, own)
        return drop(w, own), len(node.data.train)

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def whole(self, node: Node, w: Params) -> Params:
        """The shared layers and this node's BatchNorm layers."""
        return self.task.init(node.seed) | w | node.state.get("bn", {})

    def model(self, state: Params) -> Params | None:
        return None if self.task.named(_BatchNorm) else state

    def personal_model(self, node: Node, state: Params) -> Params:
        return self.whole(node, state)
