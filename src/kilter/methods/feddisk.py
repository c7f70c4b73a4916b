"""FedDisk. Nguyen, Wu, Chang: Federated Learning for distribution skewed data using sample weights (IEEE TAI 2023), Alg. 1."""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

import torch
from torch import Tensor

from kilter.blocks.density.made import Kind, density_task, made_with
from kilter.blocks.density.moments import FeatureSums, moments_of, pooled_scale, standardised
from kilter.blocks.density.ratio import (
    Judge,
    classify,
    clipped_share,
    effective_size,
    fit_until_stale,
    labelled,
    loss_of,
    normalised,
    weights_by_classifier,
    weights_by_density,
)
from kilter.core import AtNodes, Batch, Federation, Fit, Method, Node, Params, Replies, Rows, Tree, step
from kilter.errors import Mistake
from kilter.options import option
from kilter.params import average
from kilter.seeds import derive, generator
from kilter.tasks import Task
from kilter.train import Adam


class DensityState(TypedDict, total=False):
    round: int
    scale: Params  # mean and deviation of each feature over all nodes, for Gaussian density models
    made: Params | None  # the newest density model
    best: Params | None  # the best one on validation
    nll: float  # its validation loss
    stale: int  # rounds without improvement
    hidden: int  # units of the density model, where they are chosen


@dataclass(frozen=True, kw_only=True)
class FedDisk(Method):
    """FedAvg of the losses (1/n_k) sum_j a_j l_j with row weights a(x) = p(x)/q_k(x), normalised to mean one. Two density models
    (MADE) give the ratio: p of all clients, trained in federated rounds before round 1, and q_k of the client. The method assumes
    that y given x is the same everywhere. Since sum_k c_k q_k = p, the global objective is FedAvg's: the only gain is less drift.

    As printed: rule="odds" (also "prob", and "minmax2" and "tri" of the authors' scripts) with normalise="none" and clip=false,
    by a classifier that separates the outputs of q_k and p on the same rows. This is not a density ratio: the better the
    classifier, the more equal the weights. Unnormalised, the odds also shrink the client's step. As intended: "llr", the tempered
    ratio (p/q_k)^tau of the two models, or "dre", a classifier of the client's rows against samples of p; both clipped and
    normalised to mean one. Measured (experiments/feddisk): no rule, and not even the oracle on raw data, beats FedAvg on images;
    on two features with drift (experiments/control-feddisk) all of them do. The default is llr with a small tau: it is sound and
    needs no classifier.

    Receivers validate the density model in the next round, so validation costs no traffic. Peers cannot stop together: they run all
    density rounds, and each keeps the best model of its neighbourhood.
    Keeps: a weight for each training row.  Sends: its density model, its validation loss, its model, how many rows it trained on.
    """

    rule: Literal["llr", "dre", "odds", "prob", "minmax2", "tri"] = option("llr", "How densities become row weights.")
    density: Literal["auto", "bernoulli", "gaussian"] = option("auto", "auto: bernoulli for images, else gaussian.")
    start: Literal["seed", "global"] = option("seed", "Initial weights of a client's own density model.")
    hidden: int = option(30, "Hidden units of a density model; the paper: 30 MNIST, 50 X-ray, 400 FEMNIST.", at_least=1)
    hidden_choices: str = option("", "Sizes to choose `hidden` from, such as 30,100: the best on validation.")
    density_rounds: int = option(50, "Most federated rounds of the density model.", at_least=0)
    density_epochs: int = option(2, "Local epochs of a density round, and between two validations.", at_least=1)
    own_epochs: int = option(200, "Most epochs of a client's own density model.", at_least=0)
    density_patience: int = option(2, "Stop after this many validations without improvement.", at_least=1)
    density_lr: float = option(1e-2, "Adam's learning rate for density models.", above=0)
    density_batch: int = option(100, "Rows in a batch for density models; 0: all rows.", at_least=0)
    tau: float = option(
        0.0, "llr: exponent of the ratio; 0: one over the number of features; 1: the plain ratio.", at_least=0
    )
    delta: float = option(0.01, "Clip the classifier's probability to delta..1-delta.", at_least=0, below=0.5)
    clip: bool = option(True, "Clip ratios to a_min..a_max; false as printed.")
    a_min: float = option(0.1, "Smallest ratio.", at_least=0, at_most="a_max")
    a_max: float = option(10.0, "Largest ratio; a_min = a_max = 1 is FedAvg.", above=0)
    normalise: Literal["client", "none"] = option("client", "client: weights have mean one; none: as printed.")
    layers: int = option(1, "Hidden layers of a density model.", at_least=1)
    orderings: int = option(1, "Orders of the inputs that a density model averages.", at_least=1)
    judge_units: int = option(100, "Hidden units of the classifier.", at_least=1)
    judge_lr: float = option(0.01, "Learning rate of the classifier.", above=0)
    judge_epochs: int = option(40, "Most epochs of the classifier.", at_least=0)
    judge_patience: int = option(3, "Stop the classifier after this many epochs without improvement.", at_least=1)

    sends = frozenset({"model", "density", "sums", "counts"})
    states_average = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(word.strip().isdecimal() and int(word) for word in self.hidden_choices.split(",") if word):
            raise Mistake(f"hidden_choices of FedDisk is a list of sizes such as 30,100, not '{self.hidden_choices}'.")

    def setup(self, fed: Federation) -> Params:
        sizes = [{"hidden": int(word)} for word in self.hidden_choices.split(",") if word]
        states = [self.learn_density(fed, size) for size in sizes or [{}]]
        if len(states) > 1 and isinstance(states[0], AtNodes):
            raise Mistake("hidden_choices of FedDisk needs a server: peers cannot agree on a size.")
        state = states[0] if len(states) == 1 else min(states, key=lambda s: s["nll"])
        fed.pool(self.weigh, self.forget, state, view=self.best)
        return self.task.init(fed.seed)

    def learn_density(self, fed: Federation, size: dict[str, int]) -> Tree:
        """The density rounds, until the validation loss rises."""
        state: Tree = {"round": 0, "made": None, "best": None, "nll": math.inf, "stale": 0, **size}
        for at in range(self.density_rounds + 1):
            done = at if isinstance(state, AtNodes) else state["round"]  # a call for the scale is not a density round
            if done >= self.density_rounds:
                break
            state = fed.pool(self.learn, self.merge, state, view=self.newest)
            if not isinstance(state, AtNodes) and state["stale"] >= self.density_patience:
                break
        return state

    def newest(self, state: DensityState, node: str) -> Tree:
        """The density model that a node continues from; None at first, because every node derives the same one from the seed."""
        return {"round": state["round"], "made": state["made"], **common(state)}

    def best(self, state: DensityState, node: str) -> Tree:
        """The best model on validation; or the newest, not yet validated, if the last ones improved."""
        made = state["best"] if state["stale"] else state["made"]
        return {"made": made, **common(state)} if common(state) else made

    @step
    def learn(self, node: Node, now: Tree) -> Generator[Fit, Params, tuple[Params | FeatureSums, int, float]]:
        """Phase 1b: validate the common density model on my validation rows and train it on my training rows.

        Gaussian models need features on one scale, so the first reply has the sums that give it. Peers have no common scale.
        """
        model = self.density_model(node, now)
        if self.kind(node) == "gaussian" and "scale" not in now and not node.peers:
            return moments_of(node.data.train["x"]), len(node.data.train), 0.0
        train, valid = self.rows(node, now.get("scale"))
        w = model.init(node.seed) if now["made"] is None else now["made"]
        nll = model.mean_loss(w, valid if len(valid) else train)
        fit = node.fit(loss_of(model), w, self.plan(), rows=train)
        w = yield replace(fit, seed=derive(fit.seed, now["round"]))  # all density rounds are in round 0
        node.record("training loss of the density model", model.mean_loss(w, train), at=now["round"])
        return w, len(train), nll

    @step
    def merge(self, hub: Node, state: DensityState, replies: Replies) -> DensityState:
        if state["stale"] >= self.density_patience:  # this peer has finished and others continue
            return state
        if all("squares" in w for w, _, _ in replies.values()):
            return {**state, "scale": pooled_scale([(w, n) for w, n, _ in replies.values()])}
        nll = sum(n * v for _, n, v in replies.values()) / sum(n for _, n, _ in replies.values())
        better = nll < state["nll"]
        hub.record("validation loss of the density model", nll, at=state["round"])  # of the model that was sent
        return {
            **state,
            "round": state["round"] + 1,
            "made": average((w, n) for w, n, _ in replies.values()),
            "best": state["made"] if better else state["best"],
            "nll": min(nll, state["nll"]),
            "stale": 0 if better else state["stale"] + 1,
        }

    @step
    def weigh(self, node: Node, best: Tree) -> Generator[Fit, Params, None]:
        """Phases 1a and 1c: train my own density model, and weight my rows by the ratio of the two models."""
        sent = best if best is not None and "made" in best else {"made": best}
        w, model, (train, valid) = sent["made"], self.density_model(node, sent), self.rows(node, sent.get("scale"))
        first = model.init(node.seed)
        if w is None:
            node.notice("no common density model was trained: compares with the untrained one")
            w = first
        own = w if self.start == "global" else first
        fits = math.ceil(self.own_epochs / self.density_epochs)
        own = yield from fit_until_stale(node, model, own, self.plan(), train, valid, fits, self.density_patience)
        if node.exhibits and node.data.train["x"].dim() == 4 and self.kind(node) == "bernoulli":
            rng, shape = generator(node.seed, node.id, "pictures"), node.data.train["x"].shape[1:]
            drawn = torch.cat([made_with(model, each).sample(4, rng) for each in (w, own)])
            node.exhibit("samples of the common and of its own density model", drawn.reshape(-1, *shape))
        a = yield from self.ratios(node, model, w, own, train["x"].flatten(1), valid["x"].flatten(1))
        node.record("mean of the raw ratios", float(a.mean()))
        is_ratio = self.rule in ("llr", "dre", "odds") and self.clip
        if is_ratio:
            node.record("share of the ratios clipped", clipped_share(a, self.a_min, self.a_max))
        low, high = (self.a_min, self.a_max) if is_ratio else (0.0, math.inf)
        a = normalised(a, low, high) if self.normalise == "client" else a.clamp(low, high).float()
        if not bool(torch.isfinite(a).all()):
            node.notice("the weights were not finite, or all zero: trains with weights of one")
            a = torch.ones_like(a)
        node.state["weight"] = a
        node.exhibit("sample weights", a)
        node.record("effective share of the rows", effective_size(a) / len(a))
        node.note(f"weights by {self.rule}: effective sample size {effective_size(a):.1f} of {len(a)}")

    def ratios(
        self, node: Node, model: Task, w: Params, own: Params, x: Tensor, v: Tensor
    ) -> Generator[Fit, Params, Tensor]:
        """The raw ratio of each of my rows x; v are validation rows."""
        p, q = made_with(model, w), made_with(model, own)
        judge = Judge(self.judge_units, self.judge_lr, self.judge_epochs, self.judge_patience)
        if self.rule == "llr":
            log_ratio = (model.predict(w, x) - model.predict(own, x)).sum(1)
            return weights_by_density(log_ratio, self.tau or 1 / x.shape[1])
        if self.rule == "dre":
            rng = node.rng
            # Samples of a Bernoulli model are binary. Real rows are made binary too, or grey values would identify them.
            mine = [torch.bernoulli(t, generator=rng) if p.kind == "bernoulli" else t for t in (x, v)]
            rows, check = (labelled(zeros, p.sample(len(zeros), rng)) for zeros in mine)
            return weights_by_classifier((yield from classify(node, rows, check, x, judge)), "odds", self.delta)
        u = q.means(x)
        rows, check = labelled(u, p.means(x)), labelled(q.means(v), p.means(v))
        return weights_by_classifier((yield from classify(node, rows, check, u, judge)), self.rule, self.delta)

    @step
    def forget(self, hub: Node, state: DensityState, replies: Replies) -> None:
        """Discard the density models."""

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        """Phase 2."""
        n = len(node.data.train)
        if "weight" not in node.state:
            node.notice("missed the density phase: trains with weights of one")
        w = yield node.fit(self.loss, w, self.local, weight=node.state.get("weight", torch.ones(n)))
        return w, n

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def plan(self) -> Adam:
        return Adam(lr=self.density_lr, batch=self.density_batch, epochs=self.density_epochs)

    def kind(self, node: Node) -> Kind:
        """What the density model predicts: Bernoulli for images, Gaussian for tables."""
        if self.density == "auto":
            return "bernoulli" if node.data.train["x"].dim() > 2 else "gaussian"
        return self.density

    def rows(self, node: Node, scale: Params | None) -> tuple[Rows, Rows]:
        """My training and validation rows, on the common scale."""
        train, valid = node.data.train, node.data.valid
        return (train, valid) if scale is None else (standardised(train, scale), standardised(valid, scale))

    def density_model(self, node: Node, sent: Tree) -> Task:
        """The density model as a task; every node derives the same one from the seed."""
        x, kind = node.data.train["x"], self.kind(node)
        if kind == "bernoulli" and (x.min() < 0 or x.max() > 1):
            raise Mistake("A Bernoulli density model needs values in 0..1: scale them, or set density=gaussian.")
        return density_task(x[0].numel(), sent.get("hidden", self.hidden), kind, node.seed, self.layers, self.orderings)


def common(state: DensityState) -> dict[str, Tree]:
    """What every node must know of the density model besides its weights."""
    return {key: state[key] for key in ("scale", "hidden") if key in state}
