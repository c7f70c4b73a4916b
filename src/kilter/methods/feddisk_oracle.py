"""FedDiskAb, FedDisk's ablation. Nguyen, Wu, Chang: FL for distribution skewed data using sample weights (IEEE TAI 2023), VII."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.blocks.density.ratio import classify, effective_size, labelled, normalised, weights_by_classifier
from kilter.core import Batch, Each, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import average
from kilter.seeds import generator


@dataclass(frozen=True, kw_only=True)
class FedDiskOracle(Method):
    """FedDisk with weights from raw data: a classifier separates a client's rows from as many rows drawn from all clients.

    Every client receives raw rows of others, too. For comparison only; all of it counts as traffic.
    Keeps: a weight for each training row.  Sends: ITS RAW DATA, once; its model, and how many rows it trained on.
    """

    delta: float = option(0.01, "Clip the classifier's probability to delta..1-delta.", at_least=0, below=0.5)
    a_min: float = option(0.1, "Smallest ratio.", at_least=0, at_most="a_max")
    a_max: float = option(10.0, "Largest ratio; a_min = a_max = 1 is FedAvg.", above=0)

    needs = frozenset({"aggregator"})
    sends = frozenset({"rows", "model", "counts"})

    def setup(self, fed: Federation) -> Params:
        fed.map(self.weigh, Each(fed.hub(self.deal, fed.map(self.hand_over))))
        return self.task.init(fed.seed)

    @step(alike=False)
    def hand_over(self, node: Node, _: None) -> tuple[Tensor, int]:
        return node.data.train["x"], len(node.data.valid)

    @step
    def deal(self, hub: Node, replies: Replies) -> dict[str, Tensor]:
        """Give each client as many rows of the pool as it has for training and validation."""
        pool = torch.cat([x for x, _ in replies.values()])
        return {
            i: pool[torch.randperm(len(pool), generator=generator(hub.seed, "deal", i))[: len(x) + v]]
            for i, (x, v) in replies.items()
        }

    @step
    def weigh(self, node: Node, others: Tensor) -> Generator[Fit, Params, None]:
        x, v = node.data.train["x"], node.data.valid["x"]
        rows, check = labelled(x, others[: len(x)]), labelled(v, others[len(x) :])
        probability = yield from classify(node, rows, check, x)
        node.state["weight"] = a = normalised(
            weights_by_classifier(probability, "odds", self.delta), self.a_min, self.a_max
        )
        node.note(f"weights by raw data: effective sample size {effective_size(a):.1f} of {len(a)}")

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        n = len(node.data.train)
        if "weight" not in node.state:
            node.notice("missed the weighing phase: trains with weights of one")
        w = yield node.fit(self.loss, w, self.local, weight=node.state.get("weight", torch.ones(n)))
        return w, n

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)
