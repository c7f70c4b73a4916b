"""FedMD. Li, Wang: Heterogenous Federated Learning via Model Distillation (NeurIPS workshop 2019), Alg. 1."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, step
from kilter.options import option
from kilter.params import mean
from kilter.seeds import generator

State = dict[str, Any]  # mean "logits", the "round" that chose their rows, the "public" rows, and who "has" them


@dataclass(frozen=True, kw_only=True)
class FedMD(Method):
    """Clients share the logits of their models on public rows, never weights.

    Before round 1 every client trains on the public rows and then on its own. A round has three steps: *digest* (fit the mean
    logits on the last round's public rows), *revisit* (train on one's own rows, `local`), and send the logits of `align` public
    rows, the same for all clients and new in each round. The mean of logits is unweighted. A client uses its own model; there
    is no global model. The aggregator sends the public rows once to nodes that do not have them.
    Keeps: its model.  Sends: logits of public rows.
    """

    needs = frozenset({"public"})
    sends = frozenset({"predictions"})
    states_average = False
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "sites exchange class scores of public rows"
    align: int = option(5000, "Public rows in a round; all of them if there are fewer.", at_least=1)
    match: Literal["mae", "mse"] = option("mae", "Distance between logits.")
    pretrain: int = option(10, "Epochs on the public rows before the first round.", at_least=0)
    digest: int = option(1, "Epochs on the round's public rows.", at_least=1)
    digest_batch: int = option(256, "Rows in a batch of public rows; 0: all rows.", at_least=0)

    def setup(self, fed: Federation) -> State:
        state: State = {"logits": None, "round": 0, "public": {}, "has": []}
        state = fed.pool(self.ask, self.publish, state, view=self.nothing)
        return fed.pool(self.train, self.combine, state, view=self.view)

    def round(self, fed: Federation, state: State) -> State:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort), view=self.view)

    def nothing(self, state: State, _: str) -> None:
        return None

    def view(self, state: State, node: str) -> State:
        """The mean logits, and the public rows for a node that does not have them."""
        return {
            k: v for k, v in state.items() if k in ("logits", "round") or (k == "public" and node not in state["has"])
        }

    @step
    def ask(self, node: Node, _: None) -> bool:
        return node.public is not None

    @step
    def publish(self, hub: Node, state: State, replies: Replies) -> State:
        assert hub.public is not None  # it is in `needs`
        rows = {name: table[hub.public.index] for name, table in hub.public.tables.items()}  # bytes stay bytes
        return state | {"public": rows, "has": [i for i, has in replies.items() if has]}

    @step
    def train(self, node: Node, state: State) -> Generator[Fit, Params, Params]:
        if "public" in state:
            node.state["public"] = state["public"]
        w = self.own(node)
        if "w" not in node.state and self.pretrain:
            plan = replace(self.local, epochs=self.pretrain)
            w = yield node.fit(self.plain, w, plan, rows=self.public(node))
        if state["logits"] is None and node.round:
            node.notice("the set-up gave no mean logits: trains without them")
        if state["logits"] is not None:
            plan = replace(self.local, epochs=self.digest, batch=self.digest_batch)
            rows = self.chosen(node, state["round"])
            w = yield node.fit(self.distance, w, plan, rows=rows, logits=state["logits"])
        node.state["w"] = w = yield node.fit(self.plain, w, self.local)
        return {"logits": self.task.predict(w, self.chosen(node, node.round)["x"])}

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> State:
        has = [*state["has"], *(i for i in replies if i not in state["has"])]
        return state | mean(replies.values()) | {"round": hub.round, "has": has}

    def plain(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def distance(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        off = self.task.outputs(w, batch["x"], training=True) - batch["logits"]
        return (off.abs() if self.match == "mae" else off.square()).mean()

    def public(self, node: Node) -> Rows:
        return node.public or Rows.of(**node.state["public"])

    def chosen(self, node: Node, round: int) -> Rows:
        """The public rows of a round."""
        public = self.public(node)
        return public.take(torch.randperm(len(public), generator=generator(node.seed, round, "align"))[: self.align])

    def own(self, node: Node) -> Params:
        w: Params = node.state["w"] if "w" in node.state else self.task.init(node.seed)
        return w

    def model(self, state: State) -> None:
        return None

    def personal_model(self, node: Node, state: State) -> Params:
        return self.own(node)

    def shared(self, state: State) -> None:
        return None
