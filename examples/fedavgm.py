"""FedAvgM. Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution (2019), as an example of your own method.

kilter run --method examples/fedavgm.py:FedAvgM --set beta=0.5 --data digits --partition dirichlet:0.1
"""

from dataclasses import dataclass

from kilter import Method, option, step
from kilter.params import add, average, buffers, scale, sub, weights, zeros


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Method):
    """FedAvg with momentum at the aggregator: v <- beta v + (w - mean_k w_k),  w <- w - v.

    Keeps: nothing.  Sends: its model, and how many rows it trained on.
    """

    beta: float = option(0.9, "Momentum of the aggregator; 0 is FedAvg.", at_least=0, below=1)

    def setup(self, fed):
        w = self.task.init(fed.seed)
        return w, zeros(weights(w))

    def round(self, fed, state):
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def view(self, state, node):
        return state[0]  # the velocity stays at the aggregator

    @step
    def train(self, node, w):
        w = yield node.fit(self.loss, w, self.local)
        return w, len(node.data.train)

    @step
    def combine(self, hub, state, replies):
        w, v = state
        new = average(replies.values())
        v = add(scale(v, self.beta), sub(weights(w), new))
        return sub(weights(w), v) | buffers(new), v

    def loss(self, w, batch, _):
        return self.task.loss(w, batch)

    def model(self, state):
        return state[0]
