"""Server only: what the aggregator's own labelled rows are worth without any client. A control for FEDSBME."""

from collections.abc import Generator
from dataclasses import dataclass, replace

from torch import Tensor

from kilter.blocks.posterior import recount, swa
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Tree, step


@dataclass(frozen=True, kw_only=True)
class ServerOnly(Method):
    """The aggregator trains on its public rows as FEDSBME's server does, round after round; clients are never asked.

    Keeps: nothing.  Sends: nothing.
    """

    server_epochs: int = 5  # passes over the server's rows in a round
    server_lr: float = 0.01  # constant
    server_batch: int = 128  # rows in a step of the server
    pretrain: int = 5  # epochs of the server before the first round
    swa_start: float = 0.5  # share of a fit's epochs after which weights are averaged; 1: plain SGD

    needs = frozenset({"public", "aggregator"})

    def setup(self, fed: Federation) -> Params:
        w = self.task.init(fed.seed)
        return fed.hub(self.tune, w, self.pretrain) if self.pretrain else w

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.hub(self.tune, state, self.server_epochs)

    @step
    def tune(self, hub: Node, w: Params, epochs: int) -> Generator[Fit, Params, Params]:
        assert hub.public is not None
        plan = replace(self.local, lr=self.server_lr, batch=self.server_batch, epochs=epochs, decay=1.0)
        w, _, _ = yield from swa(hub, self.loss, w, plan, self.swa_start, rows=hub.public)
        return recount(self.task, w, hub.public)

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)
