"""How contributors' models reach a requester as nothing but their weighted sum. One class a scheme; all give the same sum.

For a requester with n contributors out of K peers:

    ring       n(n-1) shares and n sums travel: n^2 models a requester. A contributor sees uniformly random numbers; all n-1 others
               together could open one model.
    threshold  the same traffic. Any t contributors together could open one model; any t sums suffice if the others vanish.
    once       each peer splits once for all: K(K-1) shares and at most K sums a requester, 2K^2 models for everybody. All K-1
               others together could open one model; every peer reads each requester's weights.
    scalar     as ring, but a share is parallel to the layer: IT HIDES NOTHING BUT A SCALE. As SLFed prints it, for comparison.

In every scheme a requester in league with all contributors but one learns that one's model from the sum: no sharing of sums can
prevent it. A requester gets a sum only if every share in it arrived everywhere it had to (threshold: in t places).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from kilter.blocks import secret_sharing as secret
from kilter.core import Node, Params, Post, Tree
from kilter.trees import signature

Boxes = dict[str, Any]
SIGMA = 16  # bits behind the point of a weight
MODEL = 24  # bits behind the point of a model in `once`, where it is multiplied by a weight


def quantised(sigma: float) -> float:
    """A weight as it can be multiplied with shares: exact in 16 bits behind the point."""
    return round(sigma * 2**SIGMA) / 2**SIGMA


def desk(node: Node) -> dict[str, Any]:
    """What a node has in hand during one round; a step that was missed leaves nothing of an older round behind."""
    if node.state.get("desk", {}).get("round") != node.round:
        node.state["desk"] = {"round": node.round}
    found: dict[str, Any] = node.state["desk"]
    return found


def looking_like(pattern: Tree, box: Boxes) -> Boxes:
    """The letters that have the shape of this one; a peer that writes anything else is as good as silent."""
    wanted = signature(pattern)
    return {sender: letter for sender, letter in box.items() if signature(letter) == wanted}


def inside(box: Boxes, key: str) -> Boxes:
    """What each letter holds under this key, where it does."""
    return {sender: letter[key] for sender, letter in box.items() if isinstance(letter, dict) and key in letter}


class Scheme(ABC):
    """Four moves: ask, split, add up, join. What a scheme has to remember between them lies on the node's desk."""

    def __init__(self, trust: float) -> None:
        self.trust = trust

    def request(self, node: Node, chosen: dict[str, float]) -> Post:
        """(sigma, list) to every contributor."""
        return Post({c: {"sigma": s, "list": sorted(chosen)} for c, s in chosen.items()})

    @abstractmethod
    def cut(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        """A weighted model in shares, one for each contributor, me among them."""

    @abstractmethod
    def total(self, shares: list[Tree]) -> Tree:
        """The sum of shares."""

    @abstractmethod
    def open(self, total: Tree) -> Params:
        """The sum as numbers (float64)."""

    def split(self, node: Node, model: Params, box: Boxes) -> Post:
        """My weighted model in shares to those who contribute with me; my own share stays."""
        letters: defaultdict[str, dict[str, Tree]] = defaultdict(dict)
        desk(node)["kept"] = {}
        for requester, wish in box.items():
            members = self._members(node, requester, wish)
            if not members:
                node.notes.append("a request was not in order and is not answered")
                continue
            try:
                shares = self.cut(node, {k: v.double() * wish["sigma"] for k, v in model.items()}, members)
            except secret.Overflow as e:
                node.notes.append(f"its model is not shared: {e}")
                continue
            desk(node)["kept"][requester] = {"share": shares.pop(node.id), "list": members}
            for other, share in shares.items():
                letters[other][requester] = share
        return Post(letters)

    def _members(self, node: Node, requester: str, wish: Any) -> list[str]:
        """The contributors of a request that is in order: at least two, all within reach, I among them, a weight in (0, 1]."""
        said: dict[str, Any] = wish if isinstance(wish, dict) else {}
        members, sigma = said.get("list", []), said.get("sigma")
        fair = (
            isinstance(members, list)
            and all(isinstance(m, str) for m in members)
            and len(set(members)) == len(members) >= 2
            and node.id in members
            and requester not in members
            and all(m == node.id or m in node.peers for m in members)
            and isinstance(sigma, float)
            and 0 < sigma <= 1
        )
        return sorted(members) if fair else []

    def add_up(self, node: Node, box: Boxes) -> Post:
        """To each who asked: the sum of the shares I hold, if all came."""
        letters = Post()
        for requester, kept in desk(node).pop("kept", {}).items():
            came = looking_like(kept["share"], inside(box, requester))
            others = [m for m in kept["list"] if m != node.id]
            lost = [m for m in others if m not in came]
            shares = [came[m] for m in others if m not in lost]
            letters[requester] = {"lost": lost} if lost else {"sum": self.total([kept["share"], *shares])}
        return letters

    def join(self, node: Node, box: Boxes) -> tuple[Params, dict[str, float]] | None:
        """The sum over contributors and whose it is, or None if something was lost."""
        asked: dict[str, float] = desk(node)["asked"]
        sums = _all_of(asked, box)
        return None if sums is None else (self.open(self.total(sums)), asked)


def _all_of(who: Iterable[str], box: Boxes) -> list[Tree] | None:
    """Everyone's sum, if all came and look alike."""
    sums = inside(box, "sum")
    found = [sums[i] for i in who if i in sums]
    return found if len({signature(s) for s in found}) == 1 and all(i in sums for i in who) else None


class Ring(Scheme):
    """Additive shares modulo 2^64: fewer than all are uniformly random."""

    def cut(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        n = len(members)
        parts = {k: secret.split(secret.to_ring(v, n), n) for k, v in model.items()}
        return {member: {k: shares[at] for k, shares in parts.items()} for at, member in enumerate(members)}

    def total(self, shares: list[Tree]) -> Tree:
        return {k: secret.join([s[k] for s in shares]) for k in shares[0]}

    def open(self, total: Tree) -> Params:
        return {k: secret.from_ring(v) for k, v in total.items()}


class Scalar(Scheme):
    """As printed: random fractions of each layer, which hide nothing but a scale."""

    def cut(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        return dict(zip(members, secret.scalar_shares(model, len(members), node.rng), strict=True))

    def total(self, shares: list[Tree]) -> Tree:
        return {k: torch.stack([s[k] for s in shares]).sum(0) for k in shares[0]}

    def open(self, total: Tree) -> Params:
        return dict(total)


class Threshold(Scheme):
    """Shamir's shares: t = trust n of the contributors' sums suffice."""

    def cut(self, node: Node, model: Params, members: list[str]) -> dict[str, Tree]:
        n = len(members)
        parts = {k: secret.deal(secret.to_field(v, n), n, self.needed(n)) for k, v in model.items()}
        return {
            member: {k: torch.from_numpy(dealt[at].view("int64")) for k, dealt in parts.items()}
            for at, member in enumerate(members)
        }

    def total(self, shares: list[Tree]) -> Tree:
        return {k: torch.from_numpy(secret.field_sum([s[k].numpy() for s in shares])) for k in shares[0]}

    def open(self, total: Tree) -> Params:
        return {k: secret.from_field(v) for k, v in total.items()}

    def needed(self, parties: int) -> int:
        return max(2, math.ceil(self.trust * parties))

    def add_up(self, node: Node, box: Boxes) -> Post:
        letters = Post()
        for requester, kept in desk(node).pop("kept", {}).items():
            came = looking_like(kept["share"], inside(box, requester)) | {node.id: kept["share"]}
            here = [m for m in kept["list"] if m in came]
            shares = [came[m] for m in here]
            letters[requester] = {"sum": self.total(shares), "of": here}
        return letters

    def join(self, node: Node, box: Boxes) -> tuple[Params, dict[str, float]] | None:
        asked: dict[str, float] = desk(node)["asked"]
        numbers = {c: at + 1 for at, c in enumerate(sorted(asked))}
        groups: defaultdict[tuple[Any, ...], list[str]] = defaultdict(
            list
        )  # sums over the same contributors belong together
        for c, of in inside(box, "of").items():
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
                    k: secret.recover({numbers[c]: box[c]["sum"][k].numpy().view("uint64") for c in who})
                    for k in box[who[0]]["sum"]
                }
                return self.open(total), {c: asked[c] for c in of}
        return None


class Once(Ring):
    """Each peer splits its model once, to all; whoever asks gets weighted sums of the shares each peer holds."""

    def request(self, node: Node, chosen: dict[str, float]) -> Post:
        return Post({peer: {"weights": dict(chosen)} for peer in (*node.peers, node.id)})

    def split(self, node: Node, model: Params, box: Boxes) -> Post:
        everyone = sorted((*node.peers, node.id))
        desk(node)["wishes"] = {r: w for r, w in inside(box, "weights").items() if self._fair(r, w, everyone)}
        try:
            parts = {
                k: secret.split(secret.to_ring(v, len(everyone), MODEL + SIGMA) >> SIGMA, len(everyone))
                for k, v in model.items()
            }
        except secret.Overflow as e:
            node.notes.append(f"its model is not shared: {e}")
            return Post()
        at = {peer: p for p, peer in enumerate(everyone)}
        return Post({peer: {k: shares[at[peer]] for k, shares in parts.items()} for peer in everyone})

    @staticmethod
    def _fair(requester: str, weights: Any, everyone: list[str]) -> bool:
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
        came = looking_like(pattern, box)
        for requester, sigma in desk(node).pop("wishes", {}).items():
            lost = [c for c in sigma if c not in came]
            if lost:
                letters[requester] = {"lost": lost}
                continue
            whole = {c: round(s * 2**SIGMA) for c, s in sigma.items()}
            letters[requester] = {"sum": {k: secret.join([came[c][k] * whole[c] for c in sigma]) for k in pattern}}
        return letters

    def join(self, node: Node, box: Boxes) -> tuple[Params, dict[str, float]] | None:
        sums = _all_of((*node.peers, node.id), box)
        if sums is None:
            return None
        return {k: secret.from_ring(v, MODEL + SIGMA) for k, v in self.total(sums).items()}, desk(node)["asked"]


SCHEMES: dict[str, type[Scheme]] = {"ring": Ring, "once": Once, "threshold": Threshold, "scalar": Scalar}
