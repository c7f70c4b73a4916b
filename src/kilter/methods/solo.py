"""SOLO: every node trains alone. The baseline that federation must beat."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Tree, step


@dataclass(frozen=True, kw_only=True)
class Solo(Method):
    """Every node trains from the common initial model, round after round, without communication. There is no global model.

    Keeps: its model.  Sends: nothing.
    """

    pools = False
    sends = frozenset[str]()

    def setup(self, fed: Federation) -> None:
        return None

    def round(self, fed: Federation, state: None) -> None:
        fed.map(self.train, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, _: None) -> Generator[Fit, Params, None]:
        node.state["w"] = yield node.fit(self.loss, self.own(node), self.local)

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def own(self, node: Node) -> Params:
        return node.state["w"] if "w" in node.state else self.task.init(node.seed)

    def model(self, state: None) -> None:
        return None

    def personal_model(self, node: Node, state: None) -> Params:
        return self.own(node)
