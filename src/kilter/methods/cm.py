"""CM. Palanisamy Sundar, Li, Zou, Gao: Subjective Logic-based Decentralized FL (ARES 2024), its baseline: clusters by HDBSCAN."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.blocks.clustering import Cluster, cosines, hdbscan, model_of
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import average, pick, sub, vector


@dataclass(frozen=True, kw_only=True)
class CM(Method):
    """FedAvg within clusters. HDBSCAN clusters the clients' updates of the output layer, with the distance 1 - cos.

    The first `warm` rounds are FedAvg. Then clients are clustered in every round (or once), and the model of a cluster is the
    mean of its clients' models, weighted by n_k. A client in no cluster continues alone. A client that did not reply keeps the
    model of its last cluster. A client uses the model of its cluster; there is no global model.
    Keeps: nothing.  Sends: its model, and how many rows it trained on.
    """

    needs = frozenset({"aggregator"})
    sends = frozenset({"model", "counts"})

    size: int = option(2, "Clients in the smallest cluster.", at_least=2)
    samples: int = option(1, "HDBSCAN's min_samples: larger values make denser clusters.", at_least=1)
    warm: int = option(1, "Rounds of FedAvg before the first clustering.", at_least=0)
    once: bool = option(False, "Cluster only once.")

    def setup(self, fed: Federation) -> list[Cluster]:
        return [{"ids": list(fed.ids), "w": self.task.init(fed.seed)}]

    def round(self, fed: Federation, state: list[Cluster]) -> list[Cluster]:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def view(self, state: list[Cluster], node: str) -> Params:
        return model_of(state, node)

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        w = yield node.fit(self.loss, w, self.local)
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, state: list[Cluster], replies: Replies) -> list[Cluster]:
        regroup = hub.round > self.warm and not (self.once and hub.round > self.warm + 1)
        groups = self.regroup(hub, state, replies) if regroup else [c["ids"] for c in state]

        def model(ids: list[str]) -> Params:
            present = [replies[i] for i in ids if i in replies]
            return average(present) if present else model_of(state, ids[0])

        hub.record("clusters", sum(len(ids) > 1 for ids in groups))
        return [{"ids": ids, "w": model(ids)} for ids in groups]

    def regroup(self, hub: Node, state: list[Cluster], replies: Replies) -> list[list[str]]:
        """Clients that replied, by cluster or alone; absent clients, grouped by their last cluster."""
        head = self.task.part("head")
        moves = torch.stack([vector(sub(pick(w, head), model_of(state, i))) for i, (w, _) in replies.items()])
        groups: dict[str, list[str]] = {}
        labels = hdbscan(cosines(moves), self.size, self.samples)
        if max(labels) < 0:
            hub.notice("no cluster was found: every client continues alone")
        for i, label in zip(replies, labels, strict=True):
            groups.setdefault(f"alone {i}" if label < 0 else f"cluster {label}", []).append(i)
        absent = [[i for i in c["ids"] if i not in replies] for c in state]
        return [*groups.values(), *(ids for ids in absent if ids)]

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def model(self, state: list[Cluster]) -> None:
        return None

    def never_happened(self, state: list[Cluster]) -> list[str]:
        return [] if len(state) > 1 else ["the clients were never divided into clusters: one model for all clients"]

    def personal_model(self, node: Node, state: list[Cluster]) -> Params:
        return model_of(state, node.id)
