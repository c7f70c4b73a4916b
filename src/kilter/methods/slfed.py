"""SLFed. Palanisamy Sundar, Li, Zou, Gao: Subjective Logic-based Decentralized Federated Learning for Non-IID Data (ARES 2024)."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kilter.blocks.commitment import commitment
from kilter.blocks.gan import GAN, closeness
from kilter.blocks.secure_sum import SCHEMES, Rules, Scheme, limited, matching, quantised, scratch
from kilter.blocks.subjective_logic import Opinion, discount, from_evidence, fuse_all, is_opinion, threshold
from kilter.core import Batch, Federation, Fit, Mail, Method, Node, Params, Post, Tree, as_float, step
from kilter.errors import Mistake
from kilter.options import option
from kilter.params import weights
from kilter.seeds import derive, draw_partners
from kilter.train import Adam

Boxes = dict[str, Tree]  # {sender: letter}


@dataclass(frozen=True, kw_only=True)
class SLFed(Method):
    """Peers compare their models on GAN pictures, choose contributors by uncertainty and weight them by similarity. No server.

    A and B are linked if one of them drew the other. With D_i^j the class counts of j's model on i's pictures,
    lam = (cos(D_A^A, D_A^B) + cos(D_B^A, D_B^B)) / 2;  alpha += lam, beta += 1 - lam;  (s, d, u) = (alpha, beta, 2)/(alpha+beta+2).
    Partners send their opinions, which A discounts and fuses. Contributors C are those with u_C <= tau (Eq. 16);
    sigma_C = s_C, and PAM_A = (M_A + sum sigma_C M_C) / (1 + sum sigma_C), where A sees only sums of shares. No global model.

    As printed: `share="scalar", prior=1, told="all", fewest=2, largest_share=1`. As intended, the default: shares that hide, sums
    that hide each model (`kilter.blocks.secure_sum` says what each `share` reveals), and partners that pass on only what they saw
    themselves. A peer commits to its counts before it sees its partner's, checks an aggregated model before it adopts it, and
    draws its GAN's noise from a seed that only it knows. docs/methods/slfed.md compares paper and code line by line.
    The record of a run says whom a peer listened to and how certain it was (`kilter trust` draws it).
    Keeps: its model, its evidence on others, its GAN, others' pictures.
    Sends: GAN pictures, class counts, opinions, shares of its model.
    """

    needs = frozenset({"everyone"})
    pools = False
    sends = frozenset({"pictures", "label_counts", "opinions", "shares"})
    tasks = frozenset({"multi-class", "binary", "text"})
    tasks_reason = "peers compare the classes that their models predict"

    subset: int = option(2, "DS: how many others a peer draws each round.", at_least=1)
    prior: float = option(1.0, "Initial evidence for and against; 1 as printed, 0: complete uncertainty.", at_least=0)
    told: Literal["direct", "all"] = option(
        "direct", "Opinions that partners exchange; all: heard ones too, as printed."
    )
    memory: Literal["fused", "direct"] = option(
        "fused", "Opinion of a peer without news: the last one, or my own only."
    )
    pictures: int = option(1000, "Pictures a GAN generates.", at_least=1)
    painter: Literal["gan", "noise"] = option("gan", "noise: random pictures, to see what the GAN is worth.")
    refresh: int = option(4, "Rounds between trainings of the GAN.", at_least=1)
    frozen: int = option(20, "Last round in which the GAN is trained.", at_least=1)
    gan_epochs: int = option(3, "Epochs in one training of the GAN.", at_least=1)
    album: int = option(25, "Peers whose pictures a peer keeps, so that they are sent once.", at_least=0)
    share: Literal["ring", "once", "threshold", "scalar"] = option("ring", "How contributions are hidden.")
    trust: float = option(0.6, "threshold, once: share of the holders whose sums suffice.", above=0.5, at_most=1)
    fewest: int = option(3, "Fewest contributors of a sum; 2 as printed.", at_least=2)
    largest_share: float = option(0.5, "Largest share of one contributor in a sum.", at_least=0.5, at_most=1)
    bound: float = option(5.0, "Refuse an aggregate whose norm is this many times my model's.", above=1)
    rollback: float = option(5.0, "Refuse an aggregate with this many times an untrained model's loss.", above=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cohort < 1:
            raise Mistake("SLFed draws its own links in every round, so it has no use for a cohort: leave cohort at 1.")

    def setup(self, fed: Federation) -> None:
        return None

    def round(self, fed: Federation, state: None) -> None:
        if fed.round <= self.frozen and (fed.round - 1) % self.refresh == 0:
            fed.map(self.paint)  # train the GAN and generate new pictures
        mail: Mail = fed.map(self.train)  # send linked peers my pictures, and commit to my class counts on them
        mail = fed.map(self.judge, mail)  # return the class counts of my model on your pictures
        mail = fed.map(self.reveal, mail)  # now that I have yours, reveal my counts on my own pictures
        mail = fed.map(self.opine, mail)  # update evidence; send my opinions to partners
        mail = fed.map(self.choose, mail)  # discount, fuse, threshold; send the weights to contributors
        mail = fed.map(self.split, mail)  # send shares of my model to the other contributors
        mail = fed.map(self.add_up, mail)  # send the sum of the shares I hold to each requester
        fed.map(self.adopt, mail)  # compute my personal aggregated model

    # Steps ----------------------------------------------------------------------------------------------------------

    @step
    def paint(self, node: Node, _: None) -> Generator[Fit, Params, None]:
        gan = gan_for(node.data.train.tables["x"].shape[1:])
        node.state |= {"painted": node.round, "album": {}, "sent": {}}  # everyone paints in the same rounds
        if self.painter == "noise":
            node.state["pictures"] = gan.random(self.pictures, node.secret_seed, node.round, node.id)
            return
        z = gan.noise(len(node.data.train), node.secret_seed, node.round, node.id)
        plan = Adam(lr=2e-3, beta1=0.5, epochs=self.gan_epochs, batch=64)
        node.state["gan"] = yield node.fit(gan.loss, node.state.get("gan") or gan.init(node.seed), plan, z=z)
        purpose = (node.secret_seed, node.round, node.id, "pictures")
        node.state["pictures"] = gan.sample(node.state["gan"], self.pictures, *purpose)
        node.exhibit("synthetic pictures", node.state["pictures"])
        distance = closeness(node.state["pictures"], node.data.train["x"], node.data.valid["x"])
        if distance is not None:
            node.record("distance of pictures to own rows", distance)

    @step
    def train(self, node: Node, _: None) -> Generator[Fit, Params, Post]:
        node.state["w"] = yield node.fit(self.loss, self.own(node), self.local)
        if "pictures" not in node.state:
            node.notice("has no synthetic pictures yet: judges nobody")
            return Post()
        desk, has_them = scratch(node), node.state.get("sent", {})
        desk["mine"] = self.counts(node, node.state["pictures"])
        desk["nonce"] = derive(node.secret_seed, node.round, node.id, "nonce")
        letter = {"painted": node.state["painted"], "commitment": commitment(desk["mine"], desk["nonce"], node.id)}
        whole = letter | {"pictures": node.state["pictures"]}
        return Post({b: letter if b in has_them else whole for b in self.links(node)})

    @step
    def judge(self, node: Node, box: Boxes) -> Post:
        desk, letters = scratch(node), Post()
        if "mine" not in desk:
            return letters
        desk["committed"], desk["yours"] = {}, {}
        for b, letter in box.items():
            pictures = self.pictures_of(node, b, letter)
            if pictures is not None:
                desk["committed"][b] = letter["commitment"]
                desk["yours"][b] = self.counts(node, pictures)
                letters[b] = {"counts": desk["yours"][b], "kept": b in node.state.get("album", {})}
        return letters

    @step
    def reveal(self, node: Node, box: Boxes) -> Post:
        desk = scratch(node)
        box = matching({"counts": desk["mine"], "kept": True}, box) if "mine" in desk else {}
        desk["heard"] = {b: letter["counts"] for b, letter in box.items() if b in desk.get("yours", {})}
        now = {b: letter["kept"] for b, letter in box.items()}  # a partner that did not answer needs the pictures again
        sent = {b for b in node.state.get("sent", {}) if b not in self.links(node)}
        node.state["sent"] = dict.fromkeys(sorted(sent | {b for b, kept in now.items() if kept}), True)
        return Post({b: {"counts": desk["mine"], "nonce": desk["nonce"]} for b in desk["heard"]})

    @step
    def opine(self, node: Node, box: Boxes) -> Post:
        desk, evidence = scratch(node), dict(node.state.get("evidence", {}))
        box = matching({"counts": desk["mine"], "nonce": 0}, box) if desk.get("heard") else {}
        partners = []
        for b, letter in box.items():
            if b not in desk["heard"]:
                continue
            if commitment(letter["counts"], letter["nonce"], b) != desk["committed"][b]:
                node.note(f"the class counts of {b} are not those it committed to: they are not used")
                node.notice("class counts were not those committed to: they are not used")
                continue
            lam = (cosine(desk["mine"], desk["heard"][b]) + cosine(letter["counts"], desk["yours"][b])) / 2
            alpha, beta = evidence.get(b, (self.prior, self.prior))
            evidence[b] = alpha + lam, beta + 1 - lam
            partners.append(b)
        node.state["evidence"], desk["news"] = evidence, partners
        table = {c: tuple(from_evidence(*e)) for c, e in evidence.items()}
        if self.told == "all":
            table |= {c: tuple(o) for c, o in node.state.get("known", {}).items() if c not in partners}
        return Post({b: {c: opinion for c, opinion in table.items() if c != b} for b in partners})

    @step
    def choose(self, node: Node, box: Boxes) -> Post:
        direct = {c: from_evidence(*e) for c, e in node.state.get("evidence", {}).items()}
        known = {c: Opinion(*o) for c, o in node.state.get("known", {}).items()}
        news = scratch(node).get("news", [])
        known |= {c: o for c, o in direct.items() if self.memory == "direct" or c in news or c not in known}
        # A partner's opinion of itself does not count: anyone would recommend itself.
        received = {b: {c: o for c, o in opinions(t).items() if c != b} for b, t in box.items() if b in direct}
        subjects = {c for table in received.values() for c in table if c in node.peers}
        for c in sorted(subjects):
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
        if len(chosen) < self.fewest:
            node.notice("too few contributors to hide one in the sum: keeps its own model")
            return Post()
        scratch(node)["asked"] = limited(chosen, self.largest_share)
        return self.scheme.request(node, scratch(node)["asked"])

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
        w: Params = node.state["w"]
        joined = self.scheme.join(node, weights_and_means(w), box)
        if joined is None:
            node.notice("shares were lost: keeps its own model")
            return
        total, sigma = joined
        weight = 1 + sum(sigma.values())
        aggregate = w | {k: ((w[k].double() + v) / weight).to(w[k].dtype) for k, v in total.items()}
        if not self.is_plausible(node, w, aggregate):
            node.notice("the aggregated model is implausible, so a contributor lied: keeps its own model")
            return
        node.listened(sigma)
        node.state["w"] = aggregate

    # Parts of the steps -----------------------------------------------------------------------------------------------

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.share](Rules(self.trust, self.fewest, self.largest_share))

    def links(self, node: Node) -> list[str]:
        """The peers that drew me or that I drew. Draws are derived from the seed, so both sides know them."""
        drawn = draw_partners(tuple(sorted({node.id, *node.peers})), self.subset, node.seed, node.round)
        return [b for b in node.peers if b in drawn[node.id] or node.id in drawn[b]]

    def pictures_of(self, node: Node, peer: str, letter: Tree) -> Tensor | None:
        """A partner's pictures, from its letter or from my album; None if the letter is not valid."""
        pattern, album = {"painted": 0, "commitment": ""}, node.state.get("album", {})
        if matching(pattern, {peer: letter}):
            painted, pictures = album.get(peer, (0, None))
            return pictures if painted == letter["painted"] else None
        if not matching(pattern | {"pictures": node.state["pictures"]}, {peer: letter}):
            return None
        if peer in album or len(album) < self.album:
            node.state["album"] = album | {peer: (letter["painted"], letter["pictures"])}
        return letter["pictures"]

    def is_plausible(self, node: Node, w: Params, aggregate: Params) -> bool:
        """Whether a model that others contributed to is near enough to mine in size, and not far worse than an untrained one."""
        means = {k: v for k, v in weights_and_means(w).items() if k not in weights(w)}
        for part in (weights(w), means):
            old, new = (sum(float(a[k].double().square().sum()) for k in part) for a in (w, aggregate))
            if not new <= self.bound**2 * max(old, 1e-12):
                return False
        rows = node.data.valid if len(node.data.valid) else node.data.train
        if "untrained" not in node.state:
            node.state["untrained"] = self.task.mean_loss(self.task.init(node.seed), rows)
        loss = self.task.evaluate(aggregate, rows)["loss"]  # None: not finite
        return loss is not None and loss <= self.rollback * max(node.state["untrained"], self.task.mean_loss(w, rows))

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

    def personal_model(self, node: Node, state: None) -> Params:
        return self.own(node)


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of two count vectors, in 0..1."""
    return float(cosine_similarity(a.double(), b.double(), dim=0).clamp(0, 1))


def weights_and_means(w: Params) -> Params:
    """What a peer contributes: all floating-point parameters and buffers, no counters."""
    return weights(w) | {k: v for k, v in w.items() if v.is_floating_point()}


def opinions(table: Tree) -> dict[str, Opinion]:
    """The valid opinions in a partner's letter."""
    return {c: Opinion(*o) for c, o in table.items() if is_opinion(o)} if isinstance(table, dict) else {}


@cache
def gan_for(shape: tuple[int, ...]) -> GAN:
    return GAN(tuple(shape))
