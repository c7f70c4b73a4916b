"""MOON. Li, He, Song: Model-Contrastive Federated Learning (CVPR 2021), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, step
from kilter.options import option
from kilter.params import average


@dataclass(frozen=True, kw_only=True)
class Moon(Method):
    """FedAvg with a contrastive loss on representations: z stays near the global model's z_g and away from past local models' z_p:

    l = CE + mu l_con,  l_con = -ln [e^{cos(z, z_g)/tau} / (e^{cos(z, z_g)/tau} + sum_p e^{cos(z, z_p)/tau})].
    z is the output of the body (of the projection, if the model has one). z_g and z_p are fixed during a fit, so they are
    computed once for each row; if images are augmented, for each batch instead, because all three must see the same image.
    In a node's first round there are no past models, and l_con = -ln 1 = 0.
    Keeps: its last local models.  Sends: its model, and how many rows it trained on.
    """

    mu: float = option(1.0, "Weight of the contrastive loss; 0 is FedAvg.", at_least=0)
    tau: float = option(0.5, "Temperature.", above=0)
    buffer: int = option(1, "Past local models a node keeps.", at_least=1)

    sends = frozenset({"model", "counts"})
    mixes_rows = False

    def setup(self, fed: Federation) -> Params:
        return self.task.init(fed.seed)

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        past = node.state.get("past", [])
        empty = self.buffer - len(past)  # empty places are masked, so that the fits of all nodes have one shape
        held = torch.arange(self.buffer) < len(past)
        if self.task.augments:
            w = yield node.fit(self.loss, w, self.local, ctx=(held, [w, *past, *[w] * empty]))
        else:
            near, *far = (self.represent(p, node) for p in (w, *past))
            far += [torch.zeros_like(near)] * empty
            w = yield node.fit(self.loss, w, self.local, ctx=(held, []), near=near, far=torch.stack(far, 1))
        node.state["past"] = [*past, w][-self.buffer :]
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Batch, fixed: tuple[Tensor, list[Params]]) -> Tensor:
        held, others = fixed
        x = self.task.augmented(batch["x"])
        z = self.task.features(w, x, training=True)
        losses = self.task.rows_loss(self.task.head(w, z), batch["y"])
        if others:
            near, *past = (self.task.features(p, x) for p in others)
            far = torch.stack(past, 1)
        else:
            near, far = batch["near"], batch["far"]
        return losses.mean() + self.mu * self.contrast(z, near, far, held).mean()

    def contrast(self, z: Tensor, near: Tensor, far: Tensor, held: Tensor) -> Tensor:
        """l_con of each row: z and near (n, d), far (n, buffer, d), held (buffer,)."""
        pull = cosine_similarity(z, near, dim=-1)[:, None] / self.tau
        push = cosine_similarity(z[:, None], far, dim=-1) / self.tau
        push = push.masked_fill(~held, -torch.inf)
        return torch.cat([pull, push], 1).logsumexp(1) - pull[:, 0]

    def represent(self, w: Params, node: Node) -> Tensor:
        """z of all rows with this model, in evaluation mode."""
        return self.task.batched(lambda x: self.task.features(w, x), node.data.train["x"])
