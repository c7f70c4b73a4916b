"""Server only: training on the aggregator's labelled rows, without clients. A control for FEDSBME."""

from collections.abc import Generator
from dataclasses import dataclass, replace

from torch import Tensor

from kilter.blocks.posterior import refresh_batchnorm, swa
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Tree, step
from kilter.options import option


@dataclass(frozen=True, kw_only=True)
class ServerOnly(Method):
    """The aggregator trains on its public rows in every round, as the server of FEDSBME does. Clients take no part.

    It learns only as much as these rows show: about 70 % on digits with the default of 5 rows of each class.

    Keeps: nothing.  Sends: nothing.
    """

    server_epochs: int = option(5, "Epochs on the server's rows in a round.", at_least=1)
    server_lr: float = option(0.01, "The server's learning rate; constant.", above=0)
    server_batch: int = option(128, "Rows in a batch at the server; 0: all rows.", at_least=0)
    pretrain: int = option(5, "Epochs the server trains before the first round.", at_least=0)
    swa_start: float = option(0.5, "Share of the epochs before weight averaging starts; 1: plain SGD.", at_least=0)

    needs = frozenset({"public", "aggregator"})
    pools = False
    sends = frozenset[str]()

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
        return refresh_batchnorm(self.task, w, hub.public)

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)
