"""FedEM. Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture (NeurIPS 2021), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.errors import Mistake
from kilter.options import option
from kilter.params import average
from kilter.seeds import derive


@dataclass(frozen=True, kw_only=True)
class FedEM(Method):
    """Every client's data are a mixture, with weights pi_k, of M components w_m that all clients share.

    E-step: q_m(i) ~ pi_km exp(-l(w_m; i)), pi_km = mean_i q_m(i), with losses in evaluation mode.
    M-step: SGD on each w_m with row weights q_m. The server averages each component by n_k. A client predicts with
    sum_m pi_km softmax(w_m(x)), returned as logarithms. There is no global model.
    Keeps: its mixture pi_k.  Sends: its M components (M x FedAvg), and how many rows it trained on.
    """

    components: int = option(3, "Number of components M; 1 is FedAvg.", at_least=1)

    sends = frozenset({"model", "counts"})
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it mixes class probabilities"

    def setup(self, fed: Federation) -> list[Params]:
        w = [self.task.init(derive(fed.seed, "component", m) if m else fed.seed) for m in range(self.components)]
        if any(all(torch.equal(w[0][k], v[k]) for k in v) for v in w[1:]):
            raise Mistake(
                "FedEM's components must start from different weights: give Task a function that creates a network."
            )
        return w

    def round(self, fed: Federation, state: list[Params]) -> list[Params]:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: list[Params]) -> Generator[Fit, Params, tuple[list[Params], int]]:
        rows = node.data.train
        losses = torch.stack([self.task.rows_loss(self.task.predict(w_m, rows["x"]), rows["y"]) for w_m in w])
        q, node.state["pi"] = self.expect(self.mixture(node), losses)
        new = []
        for w_m, q_m in zip(w, q, strict=True):
            new.append((yield node.fit(self.loss, w_m, self.local, weight=q_m)))
        return new, len(rows)

    @step
    def combine(self, hub: Node, w: list[Params], replies: Replies) -> list[Params]:
        return [average((new[m], n) for new, n in replies.values()) for m in range(self.components)]

    def expect(self, pi: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The E-step: q (M, n) from pi (M,) and losses (M, n), and the next pi."""
        q = (pi.log()[:, None] - losses).softmax(0)
        return q, q.mean(1)

    def loss(self, w_m: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w_m, batch)

    def mixture(self, node: Node) -> Tensor:
        """pi_k; uniform for a node that never trained."""
        pi: Tensor = node.state.get("pi", torch.full((self.components,), 1 / self.components))
        return pi

    def model(self, state: list[Params]) -> None:
        return None

    def personal(self, node: Node, state: list[Params], x: Tensor) -> Tensor:
        logs = torch.stack([self.task.predict(w_m, x).log_softmax(1) for w_m in state])
        return (logs + self.mixture(node).log()[:, None, None]).logsumexp(0)
