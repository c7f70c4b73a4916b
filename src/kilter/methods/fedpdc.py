"""FedPDC. Zhang, Zhang: FedPDC: Federated Learning for Public Dataset Correction (arXiv 2302.12503), Alg. 1-3, Eq. 4 and 6."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, step
from kilter.options import option
from kilter.params import average, sq_norm, sub, weights

State = tuple[Params, dict[str, float]]  # the model w, and p_i of the last participants; with penalty="ratio", 1 - B_i


@dataclass(frozen=True, kw_only=True)
class FedPDC(Method):
    """FedAvg weighted by accuracy: w <- sum_i p_i w_i / sum_i p_i, p_i being the accuracy of w_i on the aggregator's rows Q.

    A node receives its own p_i of the last round (1 if it did not take part) and adds a correction to its loss F_i:

        constant  F_i + lam (1 - p_i)                 as printed: the gradient of the correction is zero, so lam has no effect
        prox      F_i + lam (1 - p_i)/2 |w - w^t|^2   as intended, from the paper's proof (A.1); the default
        public    F_i + lam (1 - mean_Q softmax_y)    Q is sent to every node once; BatchNorm does not learn from it
        scale     F_i (1 + lam (1 - p_i))             equivalent to a larger learning rate, limited to a factor of `most`

    With penalty="ratio", B_i = P / p_i of the paper's proof replaces 1 - p_i, P being the accuracy of the average on Q; B_i <=
    `most`. lam is `lam`, or 0.5 t in round t = 1, 2, ... The paper uses 10, which has no effect as printed. With lam = 10, `prox`
    holds nodes back and `scale` diverges, so our default is 0.1 (experiments/fedpdc).
    If all p_i are 0, or Q is empty, the weights are those of FedAvg. A node that did not receive Q (`public`) trains without
    correction.
    Keeps: Q (`public`).  Sends: its model, and how many rows it trained on.
    """

    correction: Literal["prox", "public", "scale", "constant"] = option("prox", "Effect of a low score on training.")
    lam: float = option(0.1, "Strength of the correction; the paper's grid: 0.1, 1, 5, 10.", at_least=0)
    lam_schedule: Literal["fixed", "linear"] = option("fixed", "linear: 0.5 t in round t, whatever lam is.")
    penalty: Literal["gap", "ratio"] = option("gap", "What lam multiplies: 1 - p_i, or B_i = P / p_i as in the proof.")
    most: float = option(10.0, "scale: largest factor; ratio: largest B_i.", at_least=1)
    size_aware: bool = option(False, "Weight by n_i p_i instead of p_i (not in the paper).")

    needs = frozenset({"public"})
    sends = frozenset({"model", "counts"})
    states_average = False
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it weights models by their accuracy on public rows"

    def setup(self, fed: Federation) -> State:
        if self.correction == "public":
            without = [i for i, lacks in fed.map(self.lacks).items() if lacks]  # in a star only the server holds Q
            if without:
                fed.map(self.keep, fed.hub(self.publish), to=without)
        return self.task.init(fed.seed), {}

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def view(self, state: State, node: str) -> tuple[Params, float]:
        """The model and the node's own last score."""
        w, p = state
        return w, p.get(node, 1.0)

    @step
    def lacks(self, node: Node, _: None) -> bool:
        return node.public is None

    @step
    def publish(self, hub: Node) -> Batch:
        assert hub.public is not None
        return {name: table[hub.public.index] for name, table in hub.public.tables.items()}  # bytes stay bytes

    @step
    def keep(self, node: Node, public: Batch) -> None:
        node.state["public"] = public

    @step
    def train(self, node: Node, sent: tuple[Params, float]) -> Generator[Fit, Params, tuple[Params, int]]:
        w, p = sent
        w = yield node.fit(self.loss, w, self.local, ctx=self.constants(node, w, p))
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        assert hub.public is not None
        if not len(hub.public):
            hub.notice("there are no public rows: averaged by numbers of rows, without correction")
            return average(replies.values()), {}
        x, y = hub.public["x"], hub.public["y"]
        p = {i: float((self.task.predict(w, x).argmax(1) == y).double().mean()) for i, (w, _) in replies.items()}
        hub.exhibit("score on public rows", p)
        hub.note(f"scores on {len(y)} public rows: {min(p.values()):.3f} to {max(p.values()):.3f}")
        if not any(p.values()):
            hub.notice("every model scores 0 on the public rows: averaged by numbers of rows")
        alpha = shares(list(p.values()), [n for _, n in replies.values()], self.size_aware)
        new = average((w, a) for (w, _), a in zip(replies.values(), alpha, strict=True))
        if self.penalty == "gap":
            return new, p
        whole = float((self.task.predict(new, x).argmax(1) == y).double().mean())
        return new, {i: 1 - min(whole / max(score, 1e-9), self.most) for i, score in p.items()}  # 1 - p is B

    def strength(self, round: int) -> float:
        """lam_t, t = 1, 2, ..."""
        return 0.5 * round if self.lam_schedule == "linear" else self.lam

    def constants(self, node: Node, w: Params, p: float) -> Tree:
        """The constants of this node's loss: the strength of the correction, and the model or rows it refers to."""
        lam = self.strength(node.round)
        if self.correction == "prox":
            return torch.tensor(lam * (1 - p)), weights(w)
        if self.correction == "public":
            public = node.public or ("public" in node.state and Rows.of(**node.state["public"]))
            if not public:
                node.notice("missed the public rows: trains without correction")
                return torch.tensor(0.0), None
            return torch.tensor(lam), public.batch()
        if self.correction == "scale":
            return torch.tensor(min(1 + lam * (1 - p), self.most)), None
        return torch.tensor(lam * (1 - p)), None

    def loss(self, w: Params, batch: Batch, constants: tuple[Tensor, Tree]) -> Tensor:
        strength, target = constants
        own = self.task.loss(w, batch)
        if self.correction == "prox":
            return own + strength / 2 * sq_norm(sub(target, w))
        if self.correction == "public" and target is not None:
            p = torch.softmax(self.task.outputs(w, target["x"]), 1)
            return own + strength * (1 - p.gather(1, target["y"][:, None]).mean())
        return own * strength if self.correction == "scale" else own + strength

    def model(self, state: State) -> Params:
        return state[0]

    def shared(self, state: State) -> State:
        return state[0], {}


def shares(p: Sequence[float], n: Sequence[float], size_aware: bool = False) -> list[float]:
    """The weight of each model: p_i, or n_i p_i with `size_aware`; n_i if every p_i is 0. They sum to one.

    >>> [round(a, 6) for a in shares([0.62, 0.48, 0.55, 0.10], [1000, 4000, 3000, 2000])]
    [0.354286, 0.274286, 0.314286, 0.057143]
    """
    scores = [a * m for a, m in zip(p, n, strict=True)] if size_aware else list(p)
    scores = scores if sum(scores) > 0 else list(n)
    return [a / sum(scores) for a in scores]
