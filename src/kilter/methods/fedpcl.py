"""FedPCL. Tan, Long, Ma, Liu, Zhou, Jiang: FL from Pre-Trained Models, a Contrastive Approach (NeurIPS 2022), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from kilter.blocks.prototypes import class_means, consensus, similarity
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, step
from kilter.options import option
from kilter.params import drop
from kilter.seeds import generator

Known = dict[str, Tensor]  # "centre" (C, d): global prototypes; "known" (C,): which classes have one; "sets" (K, C, d)
State = dict[str, Any]  # "known"; "sets": the last set of each client; the "encoder"; who "has" it


@dataclass(frozen=True, kw_only=True)
class FedPCL(Method):
    """Clients share prototypes, never weights. All use a frozen encoder r, each has a projection P_k: z = P_k r(x) / |P_k r(x)|.

    A client's prototype of class c is the mean z of its rows of c. The global prototype is the unweighted mean over the clients
    that have c; it replaces missing ones. P_k minimises CE(z . C/tau, y) with the global prototypes C, plus the mean of the same
    loss over the prototypes of each client. Prediction is by the most similar global prototype. There is no global model.
    The encoder is the network's body, trained on the aggregator's public rows (`pretrain`), or left as it is (`pretrain=0`).
    Only its training augments images, because clients compute features of their rows once.
    Keeps: its projection P_k.  Sends: its classes, and a prototype of each.
    """

    needs = frozenset({"public", "aggregator"})
    sends = frozenset({"prototypes", "label_counts"})
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it compares rows with one prototype for each class"

    tau: float = option(0.07, "Temperature.", above=0)
    width: int = option(64, "Width of the projection.", at_least=1)
    pretrain: int = option(50, "Epochs that train the encoder on public rows; 0: keep its initial weights.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            not self.pretrain
        ):  # every node can compute the initial weights, so neither public rows nor an aggregator are needed
            object.__setattr__(self, "needs", frozenset())

    def setup(self, fed: Federation) -> State:
        classes, _ = self.task.head_shape()
        nothing = {
            "centre": torch.zeros(classes, self.width),
            "known": torch.zeros(classes, dtype=torch.bool),
            "sets": torch.zeros(0, classes, self.width),
        }
        encoder = fed.hub(self.teach) if self.pretrain else {}
        state: State = {"known": nothing, "sets": {}, "encoder": encoder, "has": []}
        return fed.pool(self.describe, self.combine, state, view=self.view)

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def view(self, state: State, node: str) -> tuple[Known, Params]:
        """The prototypes, and the encoder for a node that does not have it."""
        return state["known"], {} if node in state["has"] else state["encoder"]

    @step
    def teach(self, hub: Node) -> Generator[Fit, Params, Params]:
        assert hub.public is not None  # it is in `needs`
        plan = replace(self.local, epochs=self.pretrain)
        w = yield hub.fit(self.plain, self.task.init(hub.seed), plan, rows=hub.public)
        return drop(w, self.task.part("head"))

    @step(alike=False)
    def describe(self, node: Node, message: tuple[Known, Params]) -> tuple[Tensor, Tensor]:
        r = self.encode(node, self.received(node, message[1]), node.data.train["x"])
        return self.prototypes(node, r)

    @step(alike=False)
    def train(self, node: Node, message: tuple[Known, Params]) -> Generator[Fit, Params, tuple[Tensor, Tensor]]:
        received, encoder = message
        r = self.encode(node, self.received(node, encoder), node.data.train["x"])
        # If letters were lost, the node still has prototypes of its own classes.
        mine, own, _ = consensus([self.prototypes(node, r)], self.task.head_shape()[0])
        if bool((own & ~received["known"]).any()):
            node.notice("nobody else knows one of its classes: uses its own prototype")
        centre, *sets = torch.where(
            received["known"][:, None], torch.stack([received["centre"], *received["sets"]]), mine
        )
        ctx = {"centre": centre, "known": received["known"] | own, "sets": torch.stack(sets or [centre])}
        rows = Rows.of(r=r, y=node.data.train["y"])
        node.state["P"] = yield node.fit(self.loss, self.projection(node), self.local, ctx=ctx, rows=rows)
        return self.prototypes(node, r)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        sets = state["sets"] | replies
        centre, known, filled = consensus(list(sets.values()), self.task.head_shape()[0])
        has = [*state["has"], *(i for i in replies if i not in state["has"])]
        return state | {"known": {"centre": centre, "known": known, "sets": filled}, "sets": sets, "has": has}

    def loss(self, p: Params, batch: Batch, known: Known) -> Tensor:
        z = self.project(p, batch["r"])

        def entropy(prototypes: Tensor) -> Tensor:
            logs = similarity(z, prototypes, known["known"], self.tau).log_softmax(-1)  # (..., n, C)
            return -logs.gather(-1, batch["y"][:, None].expand(*logs.shape[:-1], 1)).mean()

        return entropy(known["centre"]) + entropy(known["sets"])

    def plain(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def received(self, node: Node, encoder: Params) -> Params:
        """The frozen encoder. A node receives it once and keeps it."""
        if encoder:
            node.state["encoder"] = encoder
        kept: Params = node.state.get("encoder", {})
        return kept

    def encode(self, node: Node, encoder: Params, x: Tensor) -> Tensor:
        """r(x)"""
        w = self.task.init(node.seed) | encoder
        return self.task.batched(lambda part: self.task.features(w, part), x)

    def projection(self, node: Node) -> Params:
        """P_k; until a node has trained, an isometry that is the same for all."""
        start = torch.empty(self.width, self.task.head_shape()[1])
        p: Params = node.state.get("P") or {
            "P": torch.nn.init.orthogonal_(start, generator=generator(node.seed, "projection"))
        }
        return p

    def project(self, p: Params, r: Tensor) -> Tensor:
        """z"""
        return normalize(linear(r, p["P"]), dim=1)

    def prototypes(self, node: Node, r: Tensor) -> tuple[Tensor, Tensor]:
        return class_means(self.project(self.projection(node), r), node.data.train["y"])

    def model(self, state: State) -> None:
        return None

    def personal(self, node: Node, state: State, x: Tensor) -> Tensor:
        r = self.encode(node, state["encoder"], x)
        return similarity(
            self.project(self.projection(node), r), state["known"]["centre"], state["known"]["known"], self.tau
        )
