"""FEDSBME. Al-Ghanimi, Al-Ghanimi: Swag Technique and Dirichlet Distribution to Address Non-IID Data (IJMST 2023), Alg. 1, Eq. 2-5.

Read as FedBE (Chen, Chao: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021) with a labelled server set.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, mse_loss

from kilter.blocks import ensemble
from kilter.blocks.ensemble import Ensemble
from kilter.blocks.posterior import (
    deviation_of,
    dirichlet,
    learning_rate,
    printed_shares,
    refresh_batchnorm,
    sharpen,
    snapshots,
    swa,
    unit_deviation,
)
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, step
from kilter.errors import Mistake
from kilter.options import option
from kilter.params import average, mean, scale, weights
from kilter.seeds import derive, numpy_generator
from kilter.train import Plan
from kilter.trees import not_finite


class State(TypedDict):
    theta: Params  # the model after the server's training
    ensemble: Ensemble | None  # of the last round
    lr: float  # of the round


Reply = tuple[Params, Params | None, int]  # SWA mean, variance s2 of its path if kappa > 0, rows


@dataclass(frozen=True, kw_only=True)
class FedSBME(Method):
    """SWA at clients, a posterior over their models, and a server that trains on its own labelled rows or distils the ensemble.

    theta_i is the mean of client i's weights after its last epochs; pi_i = |D_i| / sum |D|; mean = sum_i pi_i theta_i. Samples:
        gaussian   mean + scale sqrt(Sigma) eps, Sigma = sum_i pi_i [(theta_i - mean)^2 + kappa s2_i]    (kappa = 0: Eq. 3)
        dirichlet  sum_i omega_i theta_i, omega_i ~ g_i |D_i|, g ~ Dir(gamma, ...), or omega ~ Dir(gamma |S| pi)
    The ensemble E = {mean} U {theta_i} U samples gives p(y|x) = mean_E softmax(f(x)). The next model starts at the mean. The server
        supervised   trains it on its labelled rows, with SWA
        distill      trains it towards the sharpened p(y|x) on its inputs, without labels (FedBE)
        both         does both, with equal weights
        samples      trains each sample on its labelled rows and sends their plain mean (the paper's steps 4-5)
        average      replaces it by the plain mean of E, without training
    In `supervised`, `distill` and `both` the posterior reaches the model only through E; in `supervised` it does not reach it at
    all. BatchNorm's statistics are not sampled but recomputed after every average and sample. Three results are reported: mean,
    trained (the next model) and ensemble. equations="printed" keeps the paper's 1/T (Eq. 3: the mean shrinks by the T models of
    SWA) and its Eq. 4-5, whose weights do not sum to one: the models are then near zero. The default, "sound", is FedBE's.
    With fewer replies, the posterior is over the clients that replied.
    Keeps: nothing.  Sends: theta_i, how many rows it trained on, and s2_i if kappa > 0 (then twice FedAvg's upload).
    """

    posterior: Literal["gaussian", "dirichlet"] = option("gaussian", "Distribution from which models are sampled.")
    samples: int = option(4, "Number of sampled models M.", at_least=0)
    kappa: float = option(0.0, "gaussian: weight of the variance within clients; 0 sends no variances.", at_least=0)
    scale: float = option(1.0, "gaussian: scale of the noise.", at_least=0)
    norm_deltas: bool = option(False, "gaussian: spread of unit-length updates, as in FedBE's code (with scale 0.1).")
    gamma: float = option(1.0, "dirichlet: concentration.", above=0)
    dirichlet_mode: Literal["reweight", "size_concentration"] = option("reweight", "size_concentration: unbiased.")
    equations: Literal["sound", "printed"] = option("sound", "printed: Eq. 3-5 with 1/T and without |D_i|.")
    server_mode: Literal["supervised", "distill", "both", "samples", "average"] = option(
        "supervised", "How the server trains."
    )
    server_epochs: int = option(5, "Epochs on the server's rows in a round; 0: none.", at_least=0)
    server_lr: float = option(0.01, "The server's learning rate; constant.", above=0)
    server_batch: int = option(128, "Rows in a batch at the server; 0: all rows.", at_least=0)
    pretrain: int = option(5, "Epochs the server trains before the first round.", at_least=0)
    temperature: float = option(0.5, "distill: temperature; below 1 sharpens.", above=0)
    swa_start: float = option(0.5, "Share of the epochs before weight averaging starts; 1: plain SGD.", at_least=0)
    swa_cycle: int = option(1, "Epochs in which the learning rate falls before each averaged model.", at_least=1)
    lr_schedule: Literal["fedbe", "literal", "constant"] = option("fedbe", "Schedule of the clients' learning rate.")

    needs = frozenset({"public", "aggregator"})
    sends = frozenset({"model", "sums", "counts"})
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it distils class probabilities of an ensemble"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kappa and self.averaged < 2:
            raise Mistake(
                "kappa of FedSBME needs at least two averaged models per round, or the variances that clients send are zero: "
                "use more epochs, a smaller swa_start, or kappa=0."
            )
        if self.server_mode == "samples" and not self.samples:
            raise Mistake("server_mode=samples of FedSBME needs samples: set samples to at least 1.")

    @property
    def averaged(self) -> int:
        """T: how many models of its path a client averages."""
        return snapshots(self.local.epochs, self.swa_start, self.swa_cycle)

    def setup(self, fed: Federation) -> State:
        return State(theta=fed.hub(self.begin), ensemble=None, lr=self.local.lr)

    def round(self, fed: Federation, state: State) -> State:
        now: Any = {**state, "lr": learning_rate(self.lr_schedule, self.local.lr, fed.round - 1, fed.rounds)}
        return fed.pool(self.train, self.combine, now, to=fed.sample(self.cohort), view=self.view)

    def view(self, state: State, _: str) -> tuple[Params, float]:
        return state["theta"], state["lr"]

    @step
    def begin(self, hub: Node) -> Generator[Fit, Params, Params]:
        """Algorithm line 1: the server trains on its own rows."""
        w = self.task.init(hub.seed)
        return (yield from self.tune(hub, self.loss, w, self.pretrain)) if self.pretrain else w

    @step
    def train(self, node: Node, sent: tuple[Params, float]) -> Generator[Fit, Params, Reply]:
        theta, lr = sent
        w, s2, n = yield from swa(
            node,
            self.loss,
            theta,
            replace(self.local, lr=lr),
            self.swa_start,
            squares=self.kappa > 0,
            cycle=self.swa_cycle,
        )
        w = refresh_batchnorm(self.task, w, node.data.train) if n > 1 else w
        return w, s2, len(node.data.train)

    @step
    def combine(self, hub: Node, state: State, replies: Replies) -> Generator[Fit, Params, State]:
        if len(replies) < 2:
            hub.notice("only one reply: the posterior has no spread")
        e = self.posterior_of(hub, state["theta"], list(replies.values()))
        if hub.exhibits:
            hub.exhibit("loss on public rows", self.spread(hub, e, list(replies)))
        theta = yield from self.learn(hub, e)
        if not_finite(theta):
            hub.notice("the server's model was not finite: the model stays as it was")
            return State(theta=state["theta"], ensemble=state["ensemble"], lr=state["lr"])
        return State(theta=theta, ensemble=e, lr=state["lr"])

    def posterior_of(self, hub: Node, theta: Params, replies: list[Reply]) -> Ensemble:
        """{mean} U clients U samples."""
        clients, within, sizes = [w for w, _, _ in replies], [s for _, s, _ in replies if s], [n for _, _, n in replies]
        rows = public(hub)
        centre = average(zip(clients, sizes, strict=True))
        if self.equations == "printed":
            centre |= scale(weights(centre), 1 / self.averaged)
        e = ensemble.ensemble(refresh_batchnorm(self.task, centre, rows), clients)
        if self.posterior == "dirichlet":
            rng = numpy_generator(hub.seed, hub.round, "posterior")
            by_size = self.dirichlet_mode == "size_concentration"
            if self.equations == "printed":
                e["shares"] = printed_shares(sizes, self.gamma, self.samples, rng)
            else:
                e["shares"] = dirichlet(sizes, self.gamma, by_size, self.samples, rng)
        else:
            if self.norm_deltas:
                e["centre"], deviation = unit_deviation(theta, clients)
            else:
                deviation = deviation_of(e["mean"], clients, sizes, within or None, self.kappa)
            e["deviation"] = scale(deviation, self.scale)
            e["seeds"] = [derive(hub.seed, hub.round, "posterior", m) for m in range(self.samples)]
        return ensemble.with_statistics(self.task, e, rows)

    def spread(self, hub: Node, e: Ensemble, clients: list[str]) -> dict[str, float]:
        """The loss of every member of the ensemble, and of the ensemble itself, on the server's rows."""
        rows = public(hub)
        names = ["mean", *clients, *(f"sample {m + 1}" for m in range(ensemble.size(e) - 1 - len(clients)))]
        outputs = [self.task.predict(w, rows["x"]) for w in ensemble.members(e)]
        outputs.append(self.ensemble_outputs(e, rows["x"]))
        return {
            name: float(self.task.rows_loss(o, rows["y"]).mean())
            for name, o in zip([*names, "ensemble"], outputs, strict=True)
        }

    def learn(self, hub: Node, e: Ensemble) -> Generator[Fit, Params, Params]:
        """The next model."""
        if self.server_mode == "average":
            return refresh_batchnorm(self.task, mean(ensemble.members(e)), public(hub))
        if self.server_mode == "samples":
            trained = []
            for w in ensemble.samples(e):
                tuned = (yield from self.tune(hub, self.loss, w, self.server_epochs)) if self.server_epochs else w
                trained.append(tuned)
            return refresh_batchnorm(self.task, mean(trained), public(hub))
        if not self.server_epochs:
            return e["mean"]
        if self.server_mode == "supervised":
            return (yield from self.tune(hub, self.loss, e["mean"], self.server_epochs))
        target = ensemble.probabilities(self.task, e, public(hub), classes=self.has_classes(hub))
        target = sharpen(target, self.temperature) if self.has_classes(hub) else target
        return (yield from self.tune(hub, self.distil, e["mean"], self.server_epochs, target=target))

    def tune(
        self, hub: Node, loss: Callable[..., Tensor], w: Params, epochs: int, **columns: Tensor
    ) -> Generator[Fit, Params, Params]:
        """SWA on the server's rows."""
        plan: Plan = replace(self.local, lr=self.server_lr, batch=self.server_batch, epochs=epochs, decay=1.0)
        w, _, _ = yield from swa(hub, loss, w, plan, self.swa_start, False, public(hub), self.swa_cycle, **columns)
        return refresh_batchnorm(self.task, w, public(hub))

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def has_classes(self, hub: Node) -> bool:
        """Whether outputs are scores of classes; false for regression."""
        return not public(hub)["y"].is_floating_point()

    def distil(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        """KL(ensemble || model), in regression the squared distance; with `both`, the mean of it and the loss of the labels."""
        outputs = self.task.outputs(w, batch["x"], training=True)
        if batch["y"].is_floating_point():
            kl = mse_loss(outputs, batch["target"], reduction="none").flatten(1).mean(1)
        else:
            kl = kl_div(log_softmax(outputs, 1), batch["target"], reduction="none").sum(1)
        return ((kl + self.task.rows_loss(outputs, batch["y"])) / 2 if self.server_mode == "both" else kl).mean()

    def model(self, state: State) -> Params:
        return state["theta"]

    def variants(self, state: State) -> dict[str, Callable[[Tensor], Tensor]]:
        e = state["ensemble"]
        if e is None:
            return {}
        return {
            "mean": lambda x: self.task.predict(e["mean"], x),
            "trained": lambda x: self.task.predict(state["theta"], x),
            "ensemble": lambda x: self.ensemble_outputs(e, x),
        }

    def ensemble_outputs(self, e: Ensemble, x: Tensor) -> Tensor:
        """Log-probabilities; the mean of the outputs if they are no scores of classes."""
        if self.task.kind in ("multi-class", "binary", "custom"):
            return torch.log(ensemble.probabilities(self.task, e, Rows.of(x=x)))
        return ensemble.probabilities(self.task, e, Rows.of(x=x), classes=False)

    def depends_on_rounds(self) -> bool:
        return self.lr_schedule != "constant"

    def shared(self, state: State) -> State:
        """Clients do not see the models of other clients."""
        return State(theta=state["theta"], ensemble=None, lr=state["lr"])


def public(hub: Node) -> Rows:
    assert hub.public is not None
    return hub.public
