"""FedAvg with a server that fine-tunes on its own labelled rows. A control for FEDSBME: same rows, no posterior."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kilter.blocks.posterior import learning_rate, refresh_batchnorm, swa
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import average


@dataclass(frozen=True, kw_only=True)
class FedAvgTuned(Method):
    """w <- tune(sum_k n_k/n_S w_k), where `tune` trains on the aggregator's public rows, as the server of FEDSBME does.

    With lr_schedule="fedbe" and client_swa_start=0.5, clients train as FEDSBME's do, too: the control that isolates the posterior.
    Keeps: nothing.  Sends: its model, and how many rows it trained on.
    """

    server_epochs: int = option(5, "Epochs on the server's rows in a round; 0 (and pretrain 0) is FedAvg.", at_least=0)
    server_lr: float = option(0.01, "The server's learning rate; constant.", above=0)
    server_batch: int = option(128, "Rows in a batch at the server; 0: all rows.", at_least=0)
    pretrain: int = option(5, "Epochs the server trains before the first round.", at_least=0)
    swa_start: float = option(0.5, "Share of the epochs before weight averaging starts; 1: plain SGD.", at_least=0)
    client_swa_start: float = option(1.0, "The same for clients; FEDSBME's have 0.5.", at_least=0)
    lr_schedule: Literal["constant", "fedbe", "literal"] = option("constant", "Schedule of the clients' learning rate.")

    needs = frozenset({"public", "aggregator"})
    sends = frozenset({"model", "counts"})

    def setup(self, fed: Federation) -> Params:
        w = self.task.init(fed.seed)
        return fed.hub(self.begin, w) if self.pretrain else w

    def round(self, fed: Federation, state: Params) -> Params:
        if self.lr_schedule == "constant":
            return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))
        lr = learning_rate(self.lr_schedule, self.local.lr, fed.round - 1, fed.rounds)
        new: Params | tuple[Params, float] = fed.pool(self.train, self.combine, (state, lr), to=fed.sample(self.cohort))
        return new[0] if isinstance(new, tuple) else new  # a tuple: nobody replied

    def depends_on_rounds(self) -> bool:
        return self.lr_schedule != "constant"

    @step
    def begin(self, hub: Node, w: Params) -> Generator[Fit, Params, Params]:
        return (yield from self.tune(hub, w, self.pretrain))

    @step
    def train(self, node: Node, sent: Params | tuple[Params, float]) -> Generator[Fit, Params, tuple[Params, int]]:
        w, lr = sent if isinstance(sent, tuple) else (sent, self.local.lr)
        w, _, averaged = yield from swa(node, self.loss, w, replace(self.local, lr=lr), self.client_swa_start)
        w = refresh_batchnorm(self.task, w, node.data.train) if averaged > 1 else w
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, _: Tree, replies: Replies) -> Generator[Fit, Params, Params]:
        w = average(replies.values())
        return (yield from self.tune(hub, w, self.server_epochs)) if self.server_epochs else w

    def tune(self, hub: Node, w: Params, epochs: int) -> Generator[Fit, Params, Params]:
        assert hub.public is not None
        plan = replace(self.local, lr=self.server_lr, batch=self.server_batch, epochs=epochs, decay=1.0)
        w, _, _ = yield from swa(hub, self.loss, w, plan, self.swa_start, rows=hub.public)
        return refresh_batchnorm(self.task, w, hub.public)

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)
