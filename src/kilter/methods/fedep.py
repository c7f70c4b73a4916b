"""FedEP. Guan: Tailoring Attention to Heterogeneous Data Distribution with Entropy Pooling (arXiv 2410.07678, 2024), Alg. 1, 2."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import rel_entr
from torch import Tensor

from kilter.blocks.density import mixture
from kilter.blocks.density.mixture import Floats
from kilter.blocks.label_summary import Summary, count, invalid_reason
from kilter.core import Batch, Federation, Fit, Method, Node, Params, Replies, Tree, step
from kilter.options import option
from kilter.params import average
from kilter.seeds import numpy_generator

NIL = 1e-12  # a sum of weights below this counts as zero
REFUSED = "a label summary was refused: its client is left out"


@dataclass(frozen=True, kw_only=True)
class FedEP(Method):
    """FedAvg weighted by the distance of a node's labels from those of all nodes: w <- sum_{S_t} alpha_k w_k / sum_{S_t} alpha_k.

    theta_k is a Gaussian mixture of node k's labels (EM; at most rho |Y_k| components, by BIC). f_k(c) is the mass of class c:
    `bin` over [c - 1/2, c + 1/2], `density` at c (as printed), or `hist`, the label frequencies without a mixture. Q_k = f_k + eps,
    normalised; p_k = n_k / n; P = sum_k p_k Q_k; KL_k = KL(P || Q_k). alpha_k is proportional to

        blend       p_k (1 + g KL_k)     as intended, the default: no unusual or small node dominates; g = 0 is FedAvg
        kl          KL_k                 as printed: the most distant node gets nearly all the weight (all KL_k = 0: p_k)
        code        KL_k + ln(1 / p_k)   the thesis' program, cleaned: true distributions, no shifts. Smaller nodes get more
        code_exact                       the arithmetic of Listing 5.2 over all classes (see `alphas_as_run`; `bin` means `density`)
        listing                          as the thesis ran it: code_exact over the classes that the *aggregator* has itself,
                                         with the listing's EM and BIC. A server without rows pools over all classes

    divergence="js" replaces KL_k by the Jensen-Shannon divergence of P and Q_k, which is at most ln 2.
    Measured (experiments/fedep, clients of equal size): no form beats FedAvg in global accuracy; `blend` and `code` lose little,
    `kl` loses most. The default is the form that does the least harm when sizes differ, not one that was seen to help.

    A node without a valid summary (the notes of the round say why) is left out until a valid one arrives with its model.
    Keeps: its summary; the aggregator keeps those it received.  Sends: (theta_k, n_k) or its label counts; its model.
    """

    alpha_mode: Literal["blend", "kl", "code", "code_exact", "listing"] = option(
        "blend", "How a node's weight is computed."
    )
    divergence: Literal["kl", "js"] = option("kl", "Distance of a node's labels from all nodes'; blend, kl and code.")
    label_model: Literal["bin", "density", "hist"] = option("bin", "How a node's labels become class masses.")
    g: float = option(1.0, "blend: how much the label distance counts; 0 is FedAvg.", at_least=0)
    eps: float = option(1e-2, "Mass added to every class; sets how distant a node with missing classes is.", above=0)
    rho: float = option(0.5, "Most components of a mixture, as a share of the node's classes.", above=0)
    v_floor: float = option(1e-2, "Smallest variance of a component.", above=0)
    tolerance: float = option(1e-6, "EM stops when the log-likelihood changes by less.", above=0)

    sends = frozenset({"model", "label_counts"})
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "it fits densities to the label counts of sites"

    def setup(self, fed: Federation) -> Params:
        return fed.pool(self.summarise, self.meet, self.task.init(fed.seed), view=self.nothing)

    def round(self, fed: Federation, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state, to=fed.sample(self.cohort))

    @step
    def summarise(self, node: Node, _: None) -> Summary:
        return self.summary(node)

    @step
    def meet(self, hub: Node, w: Params, replies: Replies) -> Params:
        self.weigh(hub, replies)
        return w

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, Summary]]:
        w = yield node.fit(self.loss, w, self.local)
        return w, self.summary(node)  # sent again, in case the aggregator missed it

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        alpha = self.weigh(hub, {k: summary for k, (_, summary) in replies.items()})
        if not alpha:
            hub.notice("no client with a valid label summary replied: the model stays as it was")
            return w
        hub.exhibit("aggregation weight", alpha)
        return average((w_k, alpha[k]) for k, (w_k, _) in replies.items() if k in alpha)

    def nothing(self, w: Params, node: str) -> None:
        """Nothing is sent with the request for a summary."""

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def summary(self, node: Node) -> Summary:
        """(theta_k, n_k) of my training labels, or their counts; computed once. The classes are the outputs of the network."""
        if "summary" not in node.state:
            one = node.data.train.batch(slice(0, 1))["x"]
            classes = self.task.predict(self.task.init(node.seed), one).shape[-1]
            counts = count(node.data.train["y"], classes)
            node.state["summary"] = {"rows": len(node.data.train), "classes": classes}
            if self.label_model == "hist":
                node.state["summary"] |= {"counts": counts}
            else:
                theta = self.theta(node, counts.numpy())
                padded = torch.zeros(mixture.most(classes, self.rho), 3, dtype=torch.float64)  # replies have one shape
                padded[: len(theta)] = torch.from_numpy(theta)
                node.state["summary"] |= {"theta": padded}
            shares = masses(node.state["summary"], self.label_model)
            node.exhibit("share of labels, by the mixture", {str(c): f for c, f in enumerate(shares)})
        return node.state["summary"]

    def theta(self, node: Node, counts: NDArray[np.int64]) -> Floats:
        """The mixture of these label counts."""
        if self.alpha_mode == "listing":
            rng = numpy_generator(node.seed, node.id, "mixture")
            return mixture.choose_as_listed(counts, self.rho, self.v_floor, self.tolerance, rng)
        return mixture.choose(counts, self.rho, self.v_floor, self.tolerance)

    def weigh(self, hub: Node, sent: Mapping[str, Tree]) -> dict[str, float]:
        """alpha_k of the nodes that replied, from all known summaries. A node without a valid summary has no alpha."""
        before: dict[str, Summary] = hub.state.get("known", {})
        known = dict(before)  # the first summary of a node counts: it cannot be changed later
        for k, summary in sent.items():
            if k in known:
                continue
            if reason := invalid_reason(summary, "counts" if self.label_model == "hist" else "theta", self.v_floor):
                hub.note(f"{k} is left out: its label summary is refused, {reason}")
                hub.notice(REFUSED)
            else:
                known[k] = summary
        classes = Counter(s["classes"] for s in known.values()).most_common(1)[0][0] if known else 0
        for k in [k for k, s in known.items() if s["classes"] != classes]:
            hub.note(f"{k} is left out: its label summary is refused, it has {known.pop(k)['classes']} classes")
            hub.notice(REFUSED)
        if known.keys() != before.keys():
            hub.state["known"] = known
            own = hub.data.train["y"] if self.alpha_mode == "listing" and len(hub.data.train) else None
            alphas = self.alphas(list(known.values()), None if own is None else own.unique().numpy())
            hub.state["alpha"] = dict(zip(known, alphas.tolist(), strict=True))
        alpha = {k: hub.state["alpha"][k] for k in sent if k in known}
        if sum(alpha.values()) > NIL or not alpha:
            return alpha
        # `kl` gives no weight to typical nodes: if only such nodes replied, weight by rows.
        hub.notice("all who replied have weight 0: averaged by numbers of rows")
        return {k: known[k]["rows"] for k in alpha}

    def alphas(self, known: Sequence[Summary], classes: NDArray[np.int64] | None = None) -> Floats:
        """alpha_k of these summaries; `listing` pools over these classes."""
        n = np.array([s["rows"] for s in known], dtype=float)
        if self.alpha_mode in ("code_exact", "listing"):
            joint = np.stack([joint_as_run(s, s["rows"] / n.sum()) for s in known])
            return alphas_as_run(joint if classes is None else joint[:, classes], self.eps)
        f = np.stack([masses(s, self.label_model) for s in known])
        return alphas(f, n, self.alpha_mode, self.eps, self.g, self.divergence)


def masses(summary: Summary, label_model: str) -> Floats:
    """f_k(c) for every class c of the common label set."""
    if label_model == "hist":
        return np.asarray(summary["counts"].numpy() / summary["rows"])
    theta = summary["theta"].numpy()
    mass = mixture.bins if label_model == "bin" else mixture.density
    return mass(theta[theta[:, 0] > 0], summary["classes"])


def smoothed(f: Floats, eps: float) -> Floats:
    """Q_k: a distribution with positive mass for every class."""
    return (f + eps) / (f + eps).sum(axis=1, keepdims=True)


def divergences(q: Floats, n: Floats, kind: str = "kl") -> Floats:
    """KL_k = sum_c P ln(P / Q_k) with P = sum_k n_k/n Q_k; "js": the mean of KL(P || M) and KL(Q_k || M), M = (P + Q_k)/2."""
    p = n / n.sum() @ q
    if kind == "js":
        middle = (p + q) / 2
        return np.asarray((rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=1) / 2)
    return np.asarray(rel_entr(p, q).sum(axis=1))


def alphas(
    f: Floats, n: Floats, mode: str = "blend", eps: float = 1e-2, g: float = 1.0, divergence: str = "kl"
) -> Floats:
    """alpha_k from masses f (nodes, classes) and numbers of rows n. They are non-negative and sum to 1.

    >>> alphas(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([100.0, 900.0])).round(3).tolist()
    [0.21, 0.79]
    """
    p, kl = n / n.sum(), divergences(smoothed(f, eps), n, divergence)
    score = {"blend": p * (1 + g * kl), "kl": kl, "code": kl - np.log(p)}[mode]
    return score / score.sum() if score.sum() > NIL else p


def joint_as_run(summary: Summary, p: float) -> Floats:
    """p_k f_k(c) as in the thesis' program: mixture weights times p_k rounded to 5 digits, means - 0.1, variances + 0.1."""
    if "counts" in summary:
        return p * masses(summary, "hist")
    theta = summary["theta"].numpy() * [p, 1, 1]
    theta = np.stack([theta[:, 0].round(5), theta[:, 1] - 0.1, theta[:, 2] + 0.1], axis=1)
    return mixture.density(theta[theta[:, 0] > 0], summary["classes"])


def alphas_as_run(joint: Floats, eps: float = 1e-2) -> Floats:
    """KL_k = sum_c P ln[(P + eps) / (p_k f_k + eps)], P = sum_k p_k f_k, normalised. p_k f_k is rounded to 4 digits, P is not."""
    total = joint.sum(axis=0)
    kl = np.maximum((total * np.log((total + eps) / (joint.round(4) + eps))).sum(axis=1), 0)
    return kl / kl.sum() if kl.sum() > NIL else joint.sum(axis=1) / joint.sum()
