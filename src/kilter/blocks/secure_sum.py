"""Secure sums: a requester learns the weighted sum of its contributors' models and nothing else. All schemes give the same sum.

For a requester with n contributors among K peers:

    ring       Sends n(n-1) shares and n sums: n^2 models for each requester. A contributor sees uniformly random numbers. All n-1
               other contributors together could reconstruct one model.
    threshold  The same traffic. Any t contributors together could reconstruct one model; any t sums suffice if others vanish.
    once       Each peer splits its model once: K(K-1) shares, and at most K sums for each requester, 2K^2 models in all. All K-1
               others together could reconstruct one model. Every peer sees the weights of each requester.
    scalar     Like ring, but a share is a multiple of the layer: IT HIDES NOTHING BUT A SCALE. As printed in SLFed, for comparison.

No scheme protects a contributor from a requester that colludes with all other contributors: the sum reveals the last model.
A requester gets a sum only if every share in it arrived at all contributors (threshold: at t of them).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable

import torch

from kilter.blocks import secret_sharing
from kilter.core import Node, Params, Post, Tree
from kilter.trees import signature

Boxes = dict[str, Tree]  # {sender: letter}
SIGMA = 16  # fractional bits of a weight
MODEL = 24  # fractional bits of a model in `once`, where it is multiplied by a weight


def quantised(sigma: float) -> float:
    """A weight rounded to SIGMA fractional bits, so that it can be multiplied with shares exactly."""
    return round(sigma * 2**SIGMA) / 2**SIGMA


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

    def __init__(self, trust: float) -> None:
        self.trust = trust

    def request(self, node: Node, chosen: dict[str, float]) -> Post:
        """Send (sigma, list) to every contributor."""
        return Post({c: {"sigma": s, "list": sorted(chosen)} for c, s in chosen.items()})

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
        for requester, request in box.items():
            members = self._members(node, requester, request)
            if not members:
                node.notice("a request to contribute was not valid: it is not answered")
                continue
            try:
                shares = self.make_shares(node, {k: v.double() * request["sigma"] for k, v in model.items()}, members)
            except secret_sharing.Overflow as e:
                node.notice(f"its model is not shared: {e}")
                continue
            scratch(node)["kept"][requester] = {"share": shares.pop(node.id), "list": members}
            for other, share in shares.items():
                letters[other][requester] = share
        return Post(letters)

    def _members(self, node: Node, requester: str, request: Tree) -> list[str]:
        """The contributors of a valid request: at least two, all of them peers, this node included, and a weight in (0, 1]."""
        table: dict[str, Tree] = request if isinstance(request, dict) else {}
        members, sigma = table.get("list", []), table.get("sigma")
        valid = (
            isinstance(members, list)
            and all(isinstance(m, str) for m in members)
            and len(set(members)) == len(members) >= 2
            and node.id in members
            and requester not in members
            and all(m == node.id or m in node.peers for m in members)
            and isinstance(sigma, float)
            and 0 < sigma <= 1
        )
        return sorted(members) if valid else []

    def add_up(self, node: Node, box: Boxes) -> Post:
        """Send each requester the sum of the shares I hold, if all arrived."""
        letters = Post()
        for requester, kept in scratch(node).pop("kept", {}).items():
            arrived = matching(kept["share"], values_under(box, requester))
            others = [m for m in kept["list"] if m != node.id]
            lost = [m for m in others if m not in arrived]
            shares = [arrived[m] for m in others if m not in lost]
            letters[requester] = {"lost": lost} if lost else {"sum": self.sum_shares([kept["share"], *shares])}
        return letters

    def join(self, node: Node, box: Boxes) -> tuple[Params, dict[str, float]] | None:
        """The sum over contributors and their weights, or None if a share was lost."""
        asked: dict[str, float] = scratch(node)["asked"]
        sums = _all_of(asked, box)
        return None if sums is None else (self.decode(self.sum_shares(sums)), asked)


def _all_of(who: Iterable[str], box: Boxes) -> list[Tree] | None:
    """The sums of all these nodes; None if one is missing or has another shape."""
    sums = values_under(box, "sum")
    arrived = [sums[i] for i in who if i in sums]
    return arrived if len({signature(s) for s in arrived}) == 1 and all(i in sums for i in who) else None


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

    def make_shares(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        return dict(zip(members, secret_sharing.scalar_shares(model, len(members), node.rng), strict=True))

    def sum_shares(self, shares: list[Tree]) -> Tree:
        return {k: torch.stack([s[k] for s in shares]).sum(0) for k in shares[0]}

    def decode(self, total: Tree) -> Params:
        return dict(total)


class Threshold(Scheme):
    """Shamir's shares: the sums of t = trust n contributors suffice."""

    def make_shares(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        n = len(members)
        parts = {k: secret_sharing.deal(secret_sharing.to_field(v, n), n, self.needed(n)) for k, v in model.items()}
        return {
            member: {k: torch.from_numpy(dealt[at].view("int64")) for k, dealt in parts.items()}
            for at, member in enumerate(members)
        }

    def sum_shares(self, shares: list[Tree]) -> Tree:
        return {k: torch.from_numpy(secret_sharing.field_sum([s[k].numpy() for s in shares])) for k in shares[0]}

    def decode(self, total: Tree) -> Params:
        return {k: secret_sharing.from_field(v) for k, v in total.items()}

    def needed(self, parties: int) -> int:
        return max(2, math.ceil(self.trust * parties))

    def add_up(self, node: Node, box: Boxes) -> Post:
        letters = Post()
        for requester, kept in scratch(node).pop("kept", {}).items():
            arrived = matching(kept["share"], values_under(box, requester)) | {node.id: kept["share"]}
            present = [m for m in kept["list"] if m in arrived]
            shares = [arrived[m] for m in present]
            letters[requester] = {"sum": self.sum_shares(shares), "of": present}
        return letters

    def join(self, node: Node, box: Boxes) -> tuple[Params, dict[str, float]] | None:
        asked: dict[str, float] = scratch(node)["asked"]
        numbers = {c: at + 1 for at, c in enumerate(sorted(asked))}
        # Only sums over the same contributors belong together.
        groups: defaultdict[tuple[tuple[str, ...], Tree], list[str]] = defaultdict(list)
        for c, of in values_under(box, "of").items():
            if (
                c in asked
                and "sum" in box[c]
                and isinstance(of, list)
                and all(m in asked for m in of if isinstance(m, str))
            ):
                groups[tuple(map(str, of)), signature(box[c]["sum"])].append(c)
        for (of, _), who in sorted(groups.items(), key=lambda g: (-len(g[0][0]), -len(g[1]), g[0][0])):
            if len(of) >= 2 and len(who) >= self.needed(len(asked)) and set(of) <= set(asked):
                total = {
                    k: secret_sharing.recover({numbers[c]: box[c]["sum"][k].numpy().view("uint64") for c in who})
                    for k in box[who[0]]["sum"]
                }
                return self.decode(total), {c: asked[c] for c in of}
        return None


class Once(Ring):
    """Each peer splits its model once, among all peers. A requester gets weighted sums of the shares that each peer holds."""

    def request(self, node: Node, chosen: dict[str, float]) -> Post:
        return Post({peer: {"weights": dict(chosen)} for peer in (*node.peers, node.id)})

    def split(self, node: Node, model: Params, box: Boxes) -> Post:
        everyone = sorted((*node.peers, node.id))
        scratch(node)["wishes"] = {
            r: w for r, w in values_under(box, "weights").items() if self._is_valid(r, w, everyone)
        }
        try:
            parts = {
                k: secret_sharing.split(secret_sharing.to_ring(v, len(everyone), MODEL + SIGMA) >> SIGMA, len(everyone))
                for k, v in model.items()
            }
        except secret_sharing.Overflow as e:
            node.notice(f"its model is not shared: {e}")
            return Post()
        at = {peer: p for p, peer in enumerate(everyone)}
        return Post({peer: {k: shares[at[peer]] for k, shares in parts.items()} for peer in everyone})

    @staticmethod
    def _is_valid(requester: str, weights: Tree, everyone: list[str]) -> bool:
        return (
            isinstance(weights, dict)
            and len(weights) >= 2
            and requester not in weights
            and set(weights) <= set(everyone)
            and all(isinstance(s, float) and 0 < s <= 1 for s in weights.values())
        )

    def add_up(self, node: Node, box: Boxes) -> Post:
        letters = Post()
        pattern: Tree = box.get(node.id, next(iter(box.values()), None))
        arrived = matching(pattern, box)
        for requester, sigma in scratch(node).pop("wishes", {}).items():
            lost = [c for c in sigma if c not in arrived]
            if lost:
                letters[requester] = {"lost": lost}
                continue
            whole = {c: round(s * 2**SIGMA) for c, s in sigma.items()}
            letters[requester] = {
                "sum": {k: secret_sharing.join([arrived[c][k] * whole[c] for c in sigma]) for k in pattern}
            }
        return letters

    def join(self, node: Node, box: Boxes) -> tuple[Params, dict[str, float]] | None:
        sums = _all_of((*node.peers, node.id), box)
        if sums is None:
            return None
        return {k: secret_sharing.from_ring(v, MODEL + SIGMA) for k, v in self.sum_shares(sums).items()}, scratch(node)[
            "asked"
        ]


SCHEMES: dict[str, type[Scheme]] = {"ring": Ring, "once": Once, "threshold": Threshold, "scalar": Scalar}
