"""FedROD. Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification (ICLR 2022), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, step
from kilter.params import average, drop, pick

OWN = "own."  # prefix of the personal head's parameters
ABSENT = 1e-9  # added to class counts, because ln 0 has no gradient


@dataclass(frozen=True, kw_only=True)
class FedROD(Method):
    """Two heads on one body. The body f and the generic head G minimise the balanced softmax loss CE(G(f) + ln n_kc, y).
    The personal head H_k learns the rest, with features and generic logits fixed: CE(sg[G(f)] + H_k(sg[f]), y). It starts at zero.

    The server averages f and G by n_k; this is the global model. A client predicts with G(f) + H_k(f).
    Keeps: its personal head H_k.  Sends: its body and generic head, and how many rows it trained on.
    """

    sends = frozenset({"model", "counts"})
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it balances classes by their counts"
    mixes_rows = False

    def setup(self, fed: Federation) -> Params:
        return self.task.init(fed.seed)

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        counts = torch.bincount(node.data.train["y"], minlength=self.task.head_shape()[0])
        own = self.own(node, w)
        w = yield node.fit(self.loss, w | own, self.local, ctx=(counts + ABSENT).log())
        node.state["head"] = pick(w, own)
        return drop(w, own), len(node.data.train)

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Batch, prior: Tensor) -> Tensor:
        f = self.task.features(w, self.task.augmented(batch["x"]), training=True)
        g = self.task.head(w, f)
        return cross_entropy(g + prior, batch["y"]) + cross_entropy(
            g.detach() + self.personal_logits(w, f.detach()), batch["y"]
        )

    def personal_logits(self, w: Params, f: Tensor) -> Tensor:
        """H_k(f)"""
        return self.task.head({k: w[OWN + k] for k in pick(w, self.task.part("head"))}, f)

    def own(self, node: Node, w: Params) -> Params:
        """This node's personal head."""
        head: Params = node.state.get("head") or {
            OWN + k: torch.zeros_like(v) for k, v in pick(w, self.task.part("head")).items()
        }
        return head

    def personal(self, node: Node, state: Params, x: Tensor) -> Tensor:
        w = state | self.own(node, state)

        def logits(x: Tensor) -> Tensor:
            f = self.task.features(w, x)
            return self.task.head(w, f) + self.personal_logits(w, f)

        return self.task.batched(logits, x)
