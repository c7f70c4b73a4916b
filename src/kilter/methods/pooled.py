"""Pooled: centralised training on the rows of all nodes. The upper bound that privacy rules out."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, step


@dataclass(frozen=True, kw_only=True)
class Pooled(Method):
    """Every node sends its raw training rows once; the aggregator then trains on their union, one fit (`local`) in each round.

    Keeps: nothing.  Sends: ITS RAW DATA. For comparison only; the data counts as traffic.
    """

    needs = frozenset({"aggregator"})
    pools = False
    sends = frozenset({"rows"})

    def setup(self, fed: Federation) -> Params:
        fed.hub(self.collect, fed.map(self.hand_over))
        return self.task.init(fed.seed)

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.hub(self.train, state)

    @step(alike=False)
    def hand_over(self, node: Node, _: None) -> Batch:
        return node.data.train.batch()

    @step
    def collect(self, hub: Node, replies: Replies) -> None:
        parts = list(replies.values())
        hub.state["rows"] = {column: torch.cat([p[column] for p in parts]) for column in parts[0]}

    @step
    def train(self, hub: Node, w: Params) -> Generator[Fit, Params, Params]:
        w = yield hub.fit(self.loss, w, self.local, rows=Rows.of(**hub.state["rows"]))
        return w

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)
