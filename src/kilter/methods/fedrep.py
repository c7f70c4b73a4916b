"""FedRep. Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized FL (ICML 2021), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass, replace

from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.errors import Mistake
from kilter.options import option
from kilter.params import average, drop, pick, weights


@dataclass(frozen=True, kw_only=True)
class FedRep(Method):
    """A shared body phi and a personal head h_k: `head_epochs` train h_k with phi frozen, then `epochs` train phi with h_k frozen.

    The server averages bodies, phi <- sum_k n_k/n_S phi_k. Heads are never uploaded, so there is no global model. A node that
    never trained is evaluated with the initial head.
    Keeps: its head.  Sends: its body, and how many rows it trained on.
    """

    head_epochs: int = option(10, "Epochs that train the head, before `epochs` that train the body.", at_least=1)
    finish: bool = option(True, "In the last round all nodes train only their heads and send nothing.")

    sends = frozenset({"model", "counts"})

    def setup(self, fed: Federation) -> Params:
        phi = drop(self.task.init(fed.seed), self.task.part("head"))
        if not weights(phi):
            raise Mistake(
                "FedRep shares the body of a network, and this network has only a head: use another model, such as mlp."
            )
        return phi

    def round(self, fed: Federation, state: Params) -> Params:
        if self.finish and fed.round >= fed.rounds > 1:
            return fed.pool(self.tune, self.keep, state)
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, phi: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        w = yield from self.tuned(node, phi)
        w = yield node.fit(self.loss, w, self.local, train=set(phi))
        return pick(w, set(phi)), len(node.data.train)

    @step
    def tune(self, node: Node, phi: Params) -> Generator[Fit, Params, None]:
        yield from self.tuned(node, phi)

    def tuned(self, node: Node, phi: Params) -> Generator[Fit, Params, Params]:
        """The model after training the head. Only the head is taken from the fit: BatchNorm's statistics belong to the body."""
        head, w = self.task.part("head"), self.whole(node, phi)
        fitted = yield node.fit(self.loss, w, replace(self.local, epochs=self.head_epochs), train=head)
        node.state["head"] = pick(fitted, head)
        return w | node.state["head"]

    @step
    def combine(self, hub: Node, phi: Params, replies: Replies) -> Params:
        return average(replies.values())

    @step
    def keep(self, hub: Node, phi: Params, replies: Replies) -> Params:
        return phi

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def whole(self, node: Node, phi: Params) -> Params:
        """The shared body and this node's own head."""
        return self.task.init(node.seed) | phi | node.state.get("head", {})

    def model(self, state: Params) -> None:
        return None

    def depends_on_rounds(self) -> bool:
        return self.finish

    def personal_model(self, node: Node, state: Params) -> Params:
        return self.whole(node, state)
