"""SLFed. Palanisamy Sundar, Li, Zou, Gao: Subjective Logic-based Decentralized Federated Learning for Non-IID Data (ARES 2024)."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kilter.blocks.gan import GAN
from kilter.blocks.secure_sum import SCHEMES, Scheme, matching, quantised, scratch
from kilter.blocks.subjective_logic import Opinion, discount, from_evidence, fuse_all, is_opinion, threshold
from kilter.core import Batch, Federation, Fit, Mail, Method, Node, Params, Post, Tree, as_float, step
from kilter.options import option
from kilter.params import weights
from kilter.seeds import generator
from kilter.train import Adam

Boxes = dict[str, Tree]  # {sender: letter}


@dataclass(frozen=True, kw_only=True)
class SLFed(Method):
    """Peers compare their models on GAN pictures, choose contributors by uncertainty and weight them by similarity. No server.

    A and B are linked if one of them drew the other. With D_i^j the class counts of j's model on i's pictures,
    lam = (cos(D_A^A, D_A^B) + cos(D_B^A, D_B^B)) / 2;  alpha += lam, beta += 1 - lam;  (s, d, u) = (alpha, beta, 2)/(alpha+beta+2).
    Partners send their direct opinions, which A discounts and fuses. Contributors C are those with u_C <= tau (Eq. 16);
    sigma_C = s_C, and PAM_A = (M_A + sum sigma_C M_C) / (1 + sum sigma_C), where A sees only sums of shares. No global model.

    As printed: `share="scalar", prior=1`. `kilter.blocks.secure_sum` says what each `share` reveals. The record of a run says whom
    a peer listened to and how certain it was (`kilter trust` draws it). On a network, each peer has only its own record.
    Keeps: its model, its evidence on others, its GAN.  Sends: GAN pictures, class counts, opinions, shares of its model.
    """

    needs = frozenset({"everyone"})
    sends = frozenset({"pictures", "label_counts", "opinions", "shares"})

    subset: int = option(2, "DS: how many others a peer draws each round.", at_least=1)
    prior: float = option(1.0, "Initial evidence for and against; 1 as printed, 0: complete uncertainty.", at_least=0)
    pictures: int = option(1000, "Pictures a GAN generates.", at_least=1)
    refresh: int = option(4, "Rounds between trainings of the GAN.", at_least=1)
    frozen: int = option(20, "Last round in which the GAN is trained.", at_least=1)
    gan_epochs: int = option(3, "Epochs in one training of the GAN.", at_least=1)
    share: Literal["ring", "once", "threshold", "scalar"] = option("ring", "How contributions are hidden.")
    trust: float = option(0.6, "threshold: share of the contributors whose sums suffice.", above=0, at_most=1)

    def setup(self, fed: Federation) -> None:
        return None

    def round(self, fed: Federation, state: None) -> None:
        if fed.round <= self.frozen and (fed.round - 1) % self.refresh == 0:
            fed.map(self.paint)  # train the GAN and generate new pictures
        mail: Mail = fed.map(self.train)  # send pictures and my class counts on them to linked peers
        mail = fed.map(self.judge, mail)  # return the class counts of my model on your pictures
        mail = fed.map(self.opine, mail)  # update evidence; send my direct opinions to partners
        mail = fed.map(self.choose, mail)  # discount, fuse, threshold; send (sigma, list) to contributors
        mail = fed.map(self.split, mail)  # send shares of my model to the other contributors
        mail = fed.map(self.add_up, mail)  # send the sum of the shares I hold to each requester
        fed.map(self.adopt, mail)  # compute my personal aggregated model

    # Steps ----------------------------------------------------------------------------------------------------------

    @step
    def paint(self, node: Node, _: None) -> Generator[Fit, Params, None]:
        gan = gan_for(node.data.train.tables["x"].shape[1:])
        z = gan.noise(len(node.data.train), node.seed, node.round, node.id)
        plan = Adam(lr=2e-3, beta1=0.5, epochs=self.gan_epochs, batch=64)
        node.state["gan"] = yield node.fit(gan.loss, node.state.get("gan") or gan.init(node.seed), plan, z=z)
        node.state["pictures"] = gan.sample(
            node.state["gan"], self.pictures, node.seed, node.round, node.id, "pictures"
        )
        node.exhibit("synthetic pictures", node.state["pictures"])

    @step
    def train(self, node: Node, _: None) -> Generator[Fit, Params, Post]:
        node.state["w"] = yield node.fit(self.loss, self.own(node), self.local)
        if "pictures" not in node.state:
            node.notice("has no synthetic pictures yet: judges nobody")
            return Post()
        scratch(node)["mine"] = self.counts(node, node.state["pictures"])
        letter = {"pictures": node.state["pictures"], "counts": scratch(node)["mine"]}
        return Post(dict.fromkeys(self.links(node), letter))

    @step
    def judge(self, node: Node, box: Boxes) -> Post:
        if "mine" not in scratch(node):
            return Post()
        box = matching({"pictures": node.state["pictures"], "counts": scratch(node)["mine"]}, box)
        counts = {b: self.counts(node, letter["pictures"]) for b, letter in box.items()}
        scratch(node)["yours"] = {b: cosine(box[b]["counts"], mine) for b, mine in counts.items()}
        return Post(counts)

    @step
    def opine(self, node: Node, box: Boxes) -> Post:
        evidence = dict(node.state.get("evidence", {}))
        yours = scratch(node).get("yours", {})
        partners = [b for b in matching(scratch(node).get("mine"), box) if b in yours]
        for b in partners:
            lam = (cosine(scratch(node)["mine"], box[b]) + yours[b]) / 2
            alpha, beta = evidence.get(b, (self.prior, self.prior))
            evidence[b] = alpha + lam, beta + 1 - lam
        node.state["evidence"] = evidence
        table = {c: tuple(from_evidence(*e)) for c, e in evidence.items()}
        return Post({b: {c: opinion for c, opinion in table.items() if c != b} for b in partners})

    @step
    def choose(self, node: Node, box: Boxes) -> Post:
        direct = {c: from_evidence(*e) for c, e in node.state.get("evidence", {}).items()}
        known = {c: Opinion(*o) for c, o in node.state.get("known", {}).items()} | direct
        received = {b: opinions(table) for b, table in box.items() if b in direct}
        subjects = {c for table in received.values() for c in table if c in node.peers}
        for c in subjects:
            indirect = [discount(direct[b], table[c]) for b, table in received.items() if c in table]
            known[c] = fuse_all([direct[c], *indirect] if c in direct else indirect)
        node.state["known"] = {c: tuple(o) for c, o in known.items()}
        if not known:
            node.notice("has no opinion of any peer yet: keeps its own model")
            return Post()
        tau = threshold([o.u for o in known.values()])
        chosen = {c: quantised(o.s) for c, o in sorted(known.items()) if o.u <= tau and quantised(o.s) > 0}
        node.record("mean uncertainty about known peers", sum(o.u for o in known.values()) / len(known))
        node.record("peers asked", len(chosen))
        if len(chosen) < 2:
            node.notice("fewer than two contributors: keeps its own model")  # one alone would be revealed
            return Post()
        scratch(node)["asked"] = chosen
        return self.scheme.request(node, chosen)

    @step
    def split(self, node: Node, box: Boxes) -> Post:
        return self.scheme.split(node, weights_and_means(node.state["w"]), box) if "w" in node.state else Post()

    @step
    def add_up(self, node: Node, box: Boxes) -> Post:
        return self.scheme.add_up(node, box)

    @step
    def adopt(self, node: Node, box: Boxes) -> None:
        if "asked" not in scratch(node):
            return
        joined = self.scheme.join(node, box)
        if joined is None or shapes(joined[0]) != shapes(weights_and_means(node.state["w"])):
            node.notice("shares were lost: keeps its own model")
            return
        total, sigma = joined
        node.listened(sigma)
        weight = 1 + sum(sigma.values())
        w: Params = node.state["w"]
        node.state["w"] = w | {k: ((w[k].double() + v) / weight).to(w[k].dtype) for k, v in total.items()}

    # Parts of the steps -----------------------------------------------------------------------------------------------

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.share](self.trust)

    def links(self, node: Node) -> list[str]:
        """The peers that drew me or that I drew. Draws are derived from the seed, so both sides know them."""

        def drawn(a: str) -> set[str]:
            others = [i for i in sorted({node.id, *node.peers}) if i != a]
            order = torch.randperm(len(others), generator=generator(node.seed, node.round, a, "subset"))
            return {others[int(k)] for k in order[: self.subset]}

        return [b for b in node.peers if b in drawn(node.id) or node.id in drawn(b)]

    def counts(self, node: Node, pictures: Tensor) -> Tensor:
        """D: how many of these pictures my model assigns to each class."""
        outputs = self.task.predict(node.state["w"], as_float(pictures))
        return torch.bincount(outputs.argmax(1), minlength=outputs.shape[1])

    def own(self, node: Node) -> Params:
        return node.state["w"] if "w" in node.state else self.task.init(node.seed)

    def loss(self, w: Params, batch: Batch, _: Tree) -> Tensor:
        return self.task.loss(w, batch)

    def model(self, state: None) -> None:
        return None

    def personal(self, node: Node, state: None, x: Tensor) -> Tensor:
        return self.task.predict(self.own(node), x)


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of two count vectors, in 0..1."""
    return float(cosine_similarity(a.double(), b.double(), dim=0).clamp(0, 1))


def weights_and_means(w: Params) -> Params:
    """What a peer contributes: all floating-point parameters and buffers, no counters."""
    return weights(w) | {k: v for k, v in w.items() if v.is_floating_point()}


def opinions(table: Tree) -> dict[str, Opinion]:
    """The valid opinions in a partner's letter."""
    return {c: Opinion(*o) for c, o in table.items() if is_opinion(o)} if isinstance(table, dict) else {}


def shapes(w: Params) -> dict[str, torch.Size]:
    return {k: v.shape for k, v in w.items()}


@cache
def gan_for(shape: tuple[int, ...]) -> GAN:
    return GAN(tuple(shape))
