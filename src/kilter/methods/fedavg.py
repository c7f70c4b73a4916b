"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning (AISTATS 2017), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import average


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Every participant trains from w; then w <- sum_k n_k/n_S w_k over the participants of the round.

    weigh="equal" is the plain mean of their models, a control for methods whose weights are closer to equal than n_k/n_S.
    Keeps: nothing.  Sends: its model, and how many rows it trained on.
    """

    weigh: Literal["rows", "equal"] = option("rows", "What a model's weight follows: its number of rows, or nothing.")

    sends = frozenset({"model", "counts"})

    def setup(self, fed: Federation) -> Params:
        return self.task.init(fed.seed)

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        w = yield node.fit(self.loss, w, self.local)
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average([(w, n if self.weigh == "rows" else 1) for w, n in replies.values()])

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)
