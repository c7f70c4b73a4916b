"""FedDC. Gao, Fu, Li, Chen, Xu, Xu: FL with Non-IID Data via Local Drift Decoupling and Correction (CVPR 2022), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, step
from kilter.options import option
from kilter.params import add, dot, mean, scale, sq_norm, sub, weights, zeros

State = tuple[Params, Params, Params]  # the model w, the mean gradient g, and the mean drift h over all clients


@dataclass(frozen=True, kw_only=True)
class FedDC(Method):
    """Every client tracks its drift h_k and is pulled towards w - h_k: F_k + a/2 |theta - (w - h_k)|^2 + <theta, g - g_k>.

    Then h_k += theta_k - w and g_k <- g_k - g + (w - theta_k)/(K eta). The server adds the mean drift of *all* clients,
    w <- mean_S theta_k + mean_k h_k, and g += 1/N sum_S (change of g_k). The first step is therefore twice that of FedAvg. The
    server infers the change of h_k from theta_k - w, which requires one common w: peers cannot run it. Weights only, no buffers.
    Keeps: its drift h_k and gradient g_k.  Sends: its model and the change of g_k (twice FedAvg's traffic).
    """

    needs = frozenset({"aggregator"})
    sends = frozenset({"model", "sums"})

    a: float = option(0.01, "Strength of the pull towards w - h_k.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local.travel(1)  # refuses optimisers other than SGD at once

    def setup(self, fed: Federation) -> State:
        w = self.task.init(fed.seed)
        return w, zeros(weights(w)), zeros(weights(w))

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def view(self, state: State, _: str) -> tuple[Params, Params]:
        return state[0], state[1]

    @step
    def train(self, node: Node, state: tuple[Params, Params]) -> Generator[Fit, Params, tuple[Params, Params]]:
        w, g = state
        h_k, g_k = node.state.get("h", zeros(g)), node.state.get("g", zeros(g))
        theta = yield node.fit(self.loss, w, self.local, ctx=(sub(weights(w), h_k), sub(g, g_k)))
        travel = self.local.at(node.round).travel(len(node.data.train))
        drift = sub(weights(theta), w)
        node.state["h"] = add(h_k, drift)
        node.state["g"] = sub(sub(g_k, g), scale(drift, 1 / travel))
        return theta, sub(node.state["g"], g_k)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        (w, g, h), share = state, len(replies) / replies.of
        centre, dg = mean(theta for theta, _ in replies.values()), mean(dg for _, dg in replies.values())
        h = add(h, scale(sub(weights(centre), w), share))
        return centre | add(h, centre), add(g, scale(dg, share)), h

    def loss(self, theta: Params, batch: Batch, ctx: tuple[Params, Params]) -> Tensor:
        anchor, tilt = ctx
        return self.task.loss(theta, batch) + self.a / 2 * sq_norm(sub(anchor, theta)) + dot(tilt, theta)

    def model(self, state: State | tuple[Params]) -> Params:
        return state[0]

    def shared(self, state: State) -> tuple[Params]:
        return (state[0],)
