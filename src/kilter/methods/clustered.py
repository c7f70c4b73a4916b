"""Clustered FL. Sattler, Müller, Samek: Clustered FL, Model-Agnostic Distributed Multi-Task Optimization (TNNLS 2021), Alg. 3."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from kilter.blocks.clustering import Cluster, bipartition, cosines, model_of
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import average, sub, vector, weights

Reply = tuple[Params, int]


class State(TypedDict):
    clusters: list[Cluster]
    longest: float  # the length of the longest update of round 1


@dataclass(frozen=True, kw_only=True)
class Clustered(Method):
    """FedAvg within clusters. A cluster whose clients pull in different directions is split in two.

    With dW_i = w_i - w_c, a cluster splits when its mean has converged, |sum_i n_i/n dW_i| < eps1, but a client has not,
    max_i |dW_i| > eps2. The two sides minimise the largest cosine between their dW_i, and the split is made only if
    gamma < sqrt((1 - that cosine)/2) and all clients of the cluster have replied (an absent client cannot be assigned).
    Lengths are relative to the longest update of round 1, because absolute thresholds (the authors' 0.4 and 1.6) fit one
    network only. A client uses the model of its cluster; there is no global model.
    Keeps: nothing.  Sends: its model, and how many rows it trained on.
    """

    needs = frozenset({"aggregator"})
    sends = frozenset({"model", "counts"})

    eps1: float = option(0.4, "A cluster may split when its mean update is shorter than this.", at_least=0)
    eps2: float = option(1.6, "... while its longest update is longer than this.", at_least=0)
    unit: Literal["relative", "absolute"] = option("relative", "Unit of eps1 and eps2: round 1's longest update, or 1.")
    gamma: float = option(0.0, "Share of noise in an update; 0.7: split only at right angles; 0: no test.", at_least=0)
    warm: int = option(20, "Rounds before the first split.", at_least=0)
    linkage: Literal["complete", "single"] = option("complete", "complete: the authors' code; single: as in the paper.")

    def setup(self, fed: Federation) -> State:
        return {"clusters": [{"ids": list(fed.ids), "w": self.task.init(fed.seed)}], "longest": 0.0}

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def view(self, state: State, node: str) -> Params:
        return model_of(state["clusters"], node)

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, Reply]:
        w = yield node.fit(self.loss, w, self.local)
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        longest = state["longest"] or max(
            float((vector(weights(w)) - vector(weights(model_of(state["clusters"], i)))).norm())
            for i, (w, _) in replies.items()
        )
        clusters: list[Cluster] = []
        for cluster in state["clusters"]:
            complete = all(i in replies for i in cluster["ids"])
            due = len(cluster["ids"]) > 2 and hub.round > self.warm
            may_split = due and complete
            if due and not complete:
                hub.notice("a cluster could not split: not all of its clients replied")
            for ids in self.split(cluster, replies, longest) if may_split else [cluster["ids"]]:
                present = [replies[i] for i in ids if i in replies]
                clusters.append({"ids": ids, "w": average(present) if present else cluster["w"]})
        if len(clusters) > len(state["clusters"]):
            hub.note(f"{len(clusters)} clusters: " + " | ".join(" ".join(c["ids"]) for c in clusters))
        hub.record("clusters", len(clusters))
        hub.exhibit("cluster", {i: k for k, cluster in enumerate(clusters) for i in cluster["ids"]})
        return {"clusters": clusters, "longest": longest}

    def split(self, cluster: Cluster, replies: Mapping[str, Reply], longest: float) -> list[list[str]]:
        """The ids of the cluster, or of the two clusters it is split into."""
        ids: list[str] = cluster["ids"]
        moves = torch.stack([vector(sub(weights(replies[i][0]), cluster["w"])) for i in ids]).double()
        share = torch.tensor([replies[i][1] for i in ids]).double()
        unit = longest if self.unit == "relative" else 1.0
        if (share @ moves / share.sum()).norm() >= self.eps1 * unit or moves.norm(dim=1).max() <= self.eps2 * unit:
            return [ids]
        left, right, across = bipartition(cosines(moves), self.linkage)
        if self.gamma >= ((1 - across) / 2) ** 0.5:
            return [ids]
        return [[ids[k] for k in left], [ids[k] for k in right]]  # positions in this cluster

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def model(self, state: State) -> None:
        return None

    def never_happened(self, state: State) -> list[str]:
        return [] if len(state["clusters"]) > 1 else ["the clusters never split: one model for all clients"]

    def personal_model(self, node: Node, state: State) -> Params:
        return model_of(state["clusters"], node.id)
