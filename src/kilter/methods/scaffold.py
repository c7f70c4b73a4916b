"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: Stochastic Controlled Averaging (ICML 2020), Alg. 1, option II."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, step
from kilter.options import option
from kilter.params import add, dot, mean, move, scale, sub, weights, zeros

State = tuple[Params, Params]  # the model x and the control variate c


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Local steps y <- y - eta (g - c_i + c); then c_i <- c_i - c + (x - y)/(K eta). x and c move by the mean change.

    With momentum, the distance that a unit gradient travels (`Plan.travel`) replaces K eta: c_i stays a mean gradient.
    Keeps: its control variate c_i.  Sends: its model and the change of c_i (twice FedAvg's traffic).
    """

    server_lr: float = option(1.0, "Server learning rate: the step towards the mean.", at_least=0)

    sends = frozenset({"model", "sums"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local.travel(1)  # refuses optimisers other than SGD at once

    def setup(self, fed: Federation) -> State:
        x = self.task.init(fed.seed)
        return x, zeros(weights(x))

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, state: State) -> Generator[Fit, Params, tuple[Params, Params]]:
        x, c = state
        c_i = node.state.get("c", zeros(c))
        y = yield node.fit(self.loss, x, self.local, ctx=sub(c, c_i))
        travel = self.local.at(node.round).travel(len(node.data.train))
        node.state["c"] = add(sub(c_i, c), scale(sub(x, y), 1 / travel))
        return y, sub(node.state["c"], c_i)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        (x, c), share = state, len(replies) / replies.of
        x = move(x, mean(y for y, _ in replies.values()), self.server_lr)
        return x, add(c, scale(mean(dc for _, dc in replies.values()), share))

    def loss(self, y: Params, batch: Batch, drift: Params) -> Tensor:
        return self.task.loss(y, batch) + dot(drift, y)

    def model(self, state: State) -> Params:
        return state[0]
