"""Secure sums: a requester learns the weighted sum of its contributors' models and nothing else. All schemes give the same sum.

For a requester with n contributors among K peers; t is `trust` of the holders of shares, and always more than half of them:

    ring       Sends n(n-1) shares and n sums: n^2 models for each requester. A contributor sees uniformly random numbers. All n-1
               other contributors together could reconstruct one model. One lost share or sum, and the requester gets nothing.
    threshold  The same traffic. Any t contributors together could reconstruct one model; any t sums suffice if others vanish.
    once       Each peer splits its model once, among all K: K(K-1) shares, and at most K sums for each requester, 2K^2 models in
               all. Any t peers together could reconstruct one model; any t sums suffice. Every peer sees all requesters' weights.
    scalar     Like ring, but a share is a multiple of the layer: IT HIDES NOTHING BUT A SCALE. As printed in SLFed, for comparison.

A weighted sum can itself reveal a model: with weights (1, 0, 0) it *is* one. So contributors see all weights of a request, and
answer only if it names at least `fewest` contributors and none has more than `largest_share` of the sum (`Rules`). A requester
could send each contributor other weights, so shares carry a fingerprint of the request: a contributor adds up only shares made for
the request that it received itself, and in `once` only if t holders received the same.

What remains possible: a requester that colludes with all other contributors, or two requesters whose lists differ in one peer, can
subtract what they know from the sums. No scheme prevents a contributor from contributing a bad model: the receiver of a sum must
check it (SLFed's `bound` and `rollback`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from kilter.blocks import secret_sharing
from kilter.core import Node, Params, Post, Tree
from kilter.seeds import generator
from kilter.trees import signature

Boxes = dict[str, Tree]  # {sender: letter}
Weights = dict[str, float]  # sigma of each contributor
SIGMA = 16  # fractional bits of a weight
MODEL = 24  # fractional bits of a model in `once`, where it is multiplied by a weight
SLACK = 1e-9  # tolerance of the largest share, for rounding


def quantised(sigma: float) -> float:
    """A weight rounded to SIGMA fractional bits, so that it can be multiplied with shares exactly."""
    return round(sigma * 2**SIGMA) / 2**SIGMA


def limited(weights: Weights, largest_share: float) -> Weights:
    """The weights, with the largest reduced to `largest_share` of the sum. Needs `largest_share` >= 1/2.

    >>> limited({"a": 0.75, "b": 0.25, "c": 0.25}, 0.5)
    {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    if largest_share >= 1 or not weights:
        return weights
    top = max(weights, key=lambda c: weights[c])
    others = math.fsum(s for c, s in weights.items() if c != top)
    most = math.floor(others * largest_share / (1 - largest_share) * 2**SIGMA) / 2**SIGMA
    return weights | {top: min(weights[top], most)}


def fingerprint(weights: Weights) -> str:
    """A hash of a request, by which contributors see that all of them were sent the same weights.

    >>> fingerprint({"a": 0.5, "b": 0.25}) == fingerprint({"b": 0.25, "a": 0.5})
    True
    """
    return blake2b(repr(sorted(weights.items())).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Rules:
    """Which requests a contributor answers, and how many sums a threshold scheme needs."""

    trust: float = 0.6
    fewest: int = 3
    largest_share: float = 0.5

    def allow(self, weights: Weights) -> bool:
        """Whether a sum with these weights hides each of its models."""
        return len(weights) >= self.fewest and max(weights.values()) <= self.largest_share * math.fsum(
            weights.values()
        ) * (1 + SLACK)

    def needed(self, holders: int) -> int:
        """t: more than half, so that no two groups of holders can give sums over different contributors."""
        return min(max(2, holders // 2 + 1, math.ceil(self.trust * holders - SLACK)), holders)


def scratch(node: Node) -> dict[str, Tree]:
    """A node's working memory for one round. It starts empty in every round, even if the node missed steps of the last one."""
    if node.state.get("desk", {}).get("round") != node.round:
        node.state["desk"] = {"round": node.round}
    memory: dict[str, Tree] = node.state["desk"]
    return memory


def matching(pattern: Tree, box: Boxes) -> Boxes:
    """The letters with the shape of this one. Others are ignored, as if the peer had not written."""
    expected = signature(pattern)
    return {sender: letter for sender, letter in box.items() if signature(letter) == expected}


def values_under(box: Boxes, key: str) -> Boxes:
    """The value of this key in each letter that has it."""
    return {sender: letter[key] for sender, letter in box.items() if isinstance(letter, dict) and key in letter}


class Scheme(ABC):
    """A protocol in four steps: request, split, add up, join. State between the steps is kept in `scratch(node)`."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()

    def request(self, node: Node, chosen: Weights) -> Post:
        """Send all weights to every contributor."""
        return Post({c: {"weights": dict(chosen)} for c in chosen})

    @abstractmethod
    def make_shares(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        """Shares of a weighted model, one for each contributor, this node included."""

    @abstractmethod
    def sum_shares(self, shares: list[Tree]) -> Tree:
        """The sum of shares."""

    @abstractmethod
    def decode(self, total: Tree) -> Params:
        """The sum as floating-point numbers (float64)."""

    def split(self, node: Node, model: Params, box: Boxes) -> Post:
        """Send shares of my weighted model to the other contributors of each request; my own share stays here."""
        letters: defaultdict[str, dict[str, Tree]] = defaultdict(dict)
        scratch(node)["kept"] = {}
        for requester, weights in self.valid_requests(node, box).items():
            if node.id not in weights:
                continue
            members = sorted(weights)
            try:
                weighted = {k: v.double() * weights[node.id] for k, v in model.items()}
                shares = self.make_shares(node, weighted, members)
            except secret_sharing.Overflow as e:
                node.notice(f"its model is not shared: {e}")
                continue
            scratch(node)["kept"][requester] = {"share": shares.pop(node.id), "weights": weights}
            for other, share in shares.items():
                letters[other][requester] = {"for": fingerprint(weights), "share": share}
        return Post(letters)

    def valid_requests(self, node: Node, box: Boxes) -> dict[str, Weights]:
        """The requests that this node answers: weights in (0, 1] of peers other than the requester, as the rules allow.

        Weights that are not `quantised` are refused: those below 2^-17 would count as zero in the sum.
        """
        requests = {}
        for requester, request in box.items():
            weights = request.get("weights") if isinstance(request, dict) else None
            if (
                isinstance(weights, dict)
                and requester not in weights
                and all(m == node.id or m in node.peers for m in weights)
                and all(isinstance(s, float) and 0 < s <= 1 and quantised(s) == s for s in weights.values())
                and self.rules.allow(weights)
            ):
                requests[requester] = dict(weights)
            else:
                node.note(
                    f"the request of {requester} is not answered: it is malformed, or its sum would reveal a model"
                )
                node.notice("a request to contribute was not valid: it is not answered")
        return requests

    def add_up(self, node: Node, box: Boxes) -> Post:
        """Send each requester the sum of the shares I hold, if all arrived."""
        letters = Post()
        for requester, kept in scratch(node).pop("kept", {}).items():
            arrived = self.arrived_shares(node, requester, kept, box)
            others = [m for m in sorted(kept["weights"]) if m != node.id]
            lost = [m for m in others if m not in arrived]
            shares = [arrived[m] for m in others if m not in lost]
            letters[requester] = {"lost": lost} if lost else {"sum": self.sum_shares([kept["share"], *shares])}
        return letters

    def arrived_shares(self, node: Node, requester: str, kept: Tree, box: Boxes) -> Boxes:
        """The shares of other contributors to this request, if they were sent the same weights as I."""
        letters = matching({"for": "", "share": kept["share"]}, values_under(box, requester))
        mine = fingerprint(kept["weights"])
        for sender in [m for m, letter in letters.items() if letter["for"] != mine]:
            node.note(f"{requester} sent {sender} other weights than me: the share of {sender} is not used")
            node.notice("a requester sent contributors different weights: their shares are not used")
            del letters[sender]
        return {sender: letter["share"] for sender, letter in letters.items()}

    def join(self, node: Node, model: Params, box: Boxes) -> tuple[Params, Weights] | None:
        """The sum over contributors, each with a model like mine, and their weights; None if a share was lost."""
        asked: Weights = scratch(node)["asked"]
        sums = well_formed(node, model, box, self.number)
        return (self.decode(self.sum_shares([sums[c] for c in asked])), asked) if set(asked) <= set(sums) else None

    number = torch.int64  # the type of shares


def well_formed(node: Node, model: Params, box: Boxes, number: torch.dtype) -> Boxes:
    """The sums that have the shapes of my model. A malformed one is its sender's failure, and the notes name the sender."""
    expected = signature({k: torch.empty(v.shape, dtype=number, device="meta") for k, v in model.items()})
    sums = values_under(box, "sum")
    valid = {sender: sum_ for sender, sum_ in sums.items() if signature(sum_) == expected}
    for sender in sums.keys() - valid.keys():
        node.note(f"the sum of {sender} is malformed: it is not used")
        node.notice("a sum of shares was malformed: it is not used")
    return valid


class Ring(Scheme):
    """Additive shares modulo 2^64: any incomplete set is uniformly random."""

    def make_shares(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        n = len(members)
        parts = {k: secret_sharing.split(secret_sharing.to_ring(v, n), n) for k, v in model.items()}
        return {member: {k: shares[at] for k, shares in parts.items()} for at, member in enumerate(members)}

    def sum_shares(self, shares: list[Tree]) -> Tree:
        return {k: secret_sharing.join([s[k] for s in shares]) for k in shares[0]}

    def decode(self, total: Tree) -> Params:
        return {k: secret_sharing.from_ring(v) for k, v in total.items()}


class Scalar(Scheme):
    """As printed in SLFed: random fractions of each layer, which hide nothing but a scale."""

    number = torch.float64

    def make_shares(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        rng = generator(node.secret_seed, node.round, node.id, node.step)
        return dict(zip(members, secret_sharing.scalar_shares(model, len(members), rng), strict=True))

    def sum_shares(self, shares: list[Tree]) -> Tree:
        return {k: torch.stack([s[k] for s in shares]).sum(0) for k in shares[0]}

    def decode(self, total: Tree) -> Params:
        return dict(total)


class Threshold(Scheme):
    """Shamir's shares: the sums of t contributors suffice."""

    def make_shares(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        n = len(members)
        vector = secret_sharing.to_field(flat(model), n)
        return self.dealt(vector, model, members, self.rules.needed(n))

    def dealt(self, vector: secret_sharing.Field, like: Params, holders: list[str], needed: int) -> dict[str, Tree]:
        """Shares of a vector, each in the shapes of the model."""
        shares = secret_sharing.deal(vector, len(holders), needed)
        return {h: unflat(torch.from_numpy(s.view("int64")), like) for h, s in zip(holders, shares, strict=True)}

    def sum_shares(self, shares: list[Tree]) -> Tree:
        return {k: torch.from_numpy(secret_sharing.field_sum([s[k].numpy() for s in shares])) for k in shares[0]}

    def decode(self, total: Tree) -> Params:
        return {k: secret_sharing.from_field(v.numpy().view("uint64")) for k, v in total.items()}

    def add_up(self, node: Node, box: Boxes) -> Post:
        """Send each requester the sum of the shares that arrived, and whose they are, if that sum may be known too."""
        letters = Post()
        for requester, kept in scratch(node).pop("kept", {}).items():
            arrived = self.arrived_shares(node, requester, kept, box) | {node.id: kept["share"]}
            present = [m for m in sorted(kept["weights"]) if m in arrived]
            if self.rules.allow({m: kept["weights"][m] for m in present}):
                letters[requester] = {"sum": self.sum_shares([arrived[m] for m in present]), "of": present}
            else:
                letters[requester] = {"lost": [m for m in kept["weights"] if m not in present]}
        return letters

    def holders(self, node: Node) -> list[str]:
        """The nodes that hold shares of what this node asked for, in the order of their share numbers."""
        return sorted(scratch(node)["asked"])

    def join(self, node: Node, model: Params, box: Boxes) -> tuple[Params, Weights] | None:
        asked: Weights = scratch(node)["asked"]
        holders = self.holders(node)
        numbers = {c: at + 1 for at, c in enumerate(holders)}
        # Only sums over the same contributors belong together.
        groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        sums = well_formed(node, model, {c: letter for c, letter in box.items() if c in numbers}, self.number)
        for c in sums:
            of = box[c].get("of")
            if isinstance(of, list) and of and all(isinstance(m, str) and m in asked for m in of):
                groups[tuple(of)].append(c)
        for of, who in groups.items():  # at most one group has more than half of the holders
            if len(who) >= self.rules.needed(len(holders)):
                shares = {numbers[c]: flat(sums[c]).numpy().view("uint64") for c in who}
                total = torch.from_numpy(secret_sharing.recover(shares).view("int64"))
                return self.decode(unflat(total, model)), {c: asked[c] for c in of}
        return None


class Once(Threshold):
    """Each peer splits its model once, among all peers. A requester gets weighted sums of the shares that each peer holds."""

    def request(self, node: Node, chosen: Weights) -> Post:
        return Post({peer: {"weights": dict(chosen)} for peer in (*node.peers, node.id)})

    def holders(self, node: Node) -> list[str]:
        return sorted((*node.peers, node.id))

    def split(self, node: Node, model: Params, box: Boxes) -> Post:
        everyone = self.holders(node)
        scratch(node)["wishes"] = self.valid_requests(node, box)
        asked = {requester: fingerprint(weights) for requester, weights in scratch(node)["wishes"].items()}
        try:
            vector = secret_sharing.to_field(flat(model), len(everyone), MODEL + SIGMA, drop=SIGMA)
        except secret_sharing.Overflow as e:
            node.notice(f"its model is not shared: {e}")
            return Post()
        shares = self.dealt(vector, model, everyone, self.rules.needed(len(everyone)))
        return Post({holder: {"for": asked, "share": share} for holder, share in shares.items()})

    def add_up(self, node: Node, box: Boxes) -> Post:
        letters, shares, requests = Post(), values_under(box, "share"), values_under(box, "for")
        pattern: Tree = shares.get(node.id, next(iter(shares.values()), None))
        arrived = matching(pattern, shares)
        for requester, sigma in scratch(node).pop("wishes", {}).items():
            if not self.is_agreed(node, requester, sigma, requests):
                node.note(f"too few peers were sent the same weights by {requester} as I: it gets no sum")
                node.notice("a request was not the same at enough peers: it is not answered")
                continue
            present = [c for c in sorted(sigma) if c in arrived]
            if not self.rules.allow({c: sigma[c] for c in present}):
                letters[requester] = {"lost": [c for c in sigma if c not in present]}
                continue
            whole = [round(sigma[c] * 2**SIGMA) for c in present]
            rows = np.stack([flat(arrived[c]).numpy().view("uint64") for c in present])
            total = torch.from_numpy(secret_sharing.combine([whole], rows)[0].view("int64"))
            letters[requester] = {"sum": unflat(total, pattern), "of": present}
        return letters

    def is_agreed(self, node: Node, requester: str, sigma: Weights, requests: Boxes) -> bool:
        """Whether t holders, this one included, were sent these weights. More than half: no t others were sent different ones."""
        mine = fingerprint(sigma)
        others = [asked for sender, asked in requests.items() if sender != node.id and isinstance(asked, dict)]
        agreed = 1 + sum(asked.get(requester) == mine for asked in others)
        return agreed >= self.rules.needed(1 + len(node.peers))

    def decode(self, total: Tree) -> Params:
        return {k: secret_sharing.from_field(v.numpy().view("uint64"), MODEL + SIGMA) for k, v in total.items()}


def flat(model: Params) -> torch.Tensor:
    """All numbers of a model as one vector."""
    return torch.cat([v.reshape(-1) for v in model.values()])


def unflat(vector: torch.Tensor, like: Params) -> Params:
    """The vector in the shapes of this model."""
    parts = vector.split([v.numel() for v in like.values()])
    return {k: part.reshape(v.shape) for (k, v), part in zip(like.items(), parts, strict=True)}


SCHEMES: dict[str, type[Scheme]] = {"ring": Ring, "once": Once, "threshold": Threshold, "scalar": Scalar}
