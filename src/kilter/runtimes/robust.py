"""Robust aggregation for any method that pools: what happens to the replies before they are combined.

Replies have one structure (nesting, shapes, dtypes), so each is a vector v_k of all its floating-point numbers plus some plain
numbers (a row count). With K replies and Med the coordinate-wise median:

clip:C      v_k <- Med + (v_k - Med) min(1, C r / |v_k - Med|), r the median of |v_k - Med|; plain numbers up to C medians
median      every v_k <- Med (Yin, Chen, Kannan, Bartlett 2018)
trimmed:B   every v_k <- the mean of each coordinate without its B K smallest and B K largest values (the same paper)
krum:B      multi-Krum (Blanchard, El Mhamdi, Guerraoui, Stainer 2017): drops the B K replies farthest from their K - B K - 2
            nearest

`median` and `trimmed` make all replies equal, so their average is that reply whatever the method's weights. All four treat what
is rare as an attack: where clients' data differ a lot, honest replies do too, and robustness costs accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kilter import trees
from kilter.core import Replies, Tree
from kilter.errors import Mistake, unknown

RULES = ("clip", "median", "trimmed", "krum")
Transform = Callable[[Tensor], Tensor]  # (K, n) -> (K, n)


def parse(spec: str) -> tuple[str, float]:
    """A rule's name and its number.

    >>> parse("trimmed:0.2")
    ('trimmed', 0.2)
    """
    name, _, number = spec.partition(":")
    if name not in RULES:
        raise unknown("robust aggregation", name, RULES)
    try:
        value = float(number) if number else {"clip": 1.0, "median": 0.5}.get(name, 0.2)
    except ValueError:
        value = -1.0
    if not (0 < value < 0.5 if name in ("trimmed", "krum") else value > 0):
        raise Mistake(f"'{spec}': trimmed and krum take a share below a half (such as 0.2), clip a positive number.")
    return name, value


def robust(replies: Replies, spec: str) -> Replies:
    """The replies after this rule; unchanged without a rule or with fewer than three replies."""
    if not spec or len(replies) < 3:
        return replies
    name, value = parse(spec)
    if len({trees.signature(r) for r in replies.values()}) > 1:
        raise Mistake(f"'{spec}' needs replies of one shape, and this method's differ: choose another method.")
    vectors, numbers = zip(*(_flat(r) for r in replies.values()), strict=True)
    v, n = torch.stack(vectors), torch.tensor(numbers, dtype=torch.float64)
    if name == "krum":
        kept = krum(v, int(value * len(v)))
        return Replies({i: r for k, (i, r) in enumerate(replies.items()) if k in kept}, replies.of)
    transform: Transform = {
        "clip": lambda x: clip(x, value),
        "median": lambda x: median(x).expand_as(x),
        "trimmed": lambda x: trimmed(x, max(1, int(value * len(x)))).expand_as(x),
    }[name]
    v = transform(v)
    n = n.clamp(min=0).minimum(value * median(n)) if name == "clip" else transform(n)
    filled = (_filled(r, Pieces(v[k]), iter(n[k].tolist())) for k, r in enumerate(replies.values()))
    return Replies(dict(zip(replies, filled, strict=True)), replies.of)


def median(v: Tensor) -> Tensor:
    """The median of each coordinate; for an even count, the mean of the two middle values."""
    s, k = v.sort(dim=0).values, len(v)
    return (s[(k - 1) // 2] + s[k // 2]) / 2


def trimmed(v: Tensor, cut: int) -> Tensor:
    """The mean of each coordinate without its `cut` smallest and largest values; at least one is left."""
    cut = min(cut, (len(v) - 1) // 2)
    return v.sort(dim=0).values[cut : len(v) - cut].mean(dim=0)


def clip(v: Tensor, factor: float) -> Tensor:
    """Limit every reply's distance from the median to `factor` times the median distance."""
    centre = median(v)
    offset = v - centre
    distance = offset.norm(dim=1, keepdim=True)
    return centre + offset * (factor * median(distance) / distance.clamp_min(1e-12)).clamp(max=1.0)


def krum(v: Tensor, attackers: int) -> set[int]:
    """Positions of the K - attackers replies that are closest to their K - attackers - 2 nearest."""
    distance = torch.cdist(v.double(), v.double(), compute_mode="donot_use_mm_for_euclid_dist") ** 2
    near = max(1, len(v) - attackers - 2)
    score = distance.sort(dim=1).values[:, 1 : 1 + near].sum(dim=1)
    return set(score.argsort(stable=True)[: len(v) - attackers].tolist())


def _flat(tree: Tree) -> tuple[Tensor, list[float]]:
    """All floating-point numbers of its tensors in one vector, and its plain numbers."""
    leaves = [leaf for _, leaf in trees.leaves(tree)]
    tensors = [t.reshape(-1).float() for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat(tensors) if tensors else torch.zeros(0), [_number(x) for x in leaves if _is_number(x)]


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _number(x: float) -> float:
    return max(min(x, 1e300), -1e300)  # an int of any length


class Pieces:
    """Cuts a vector into tensors, one after another."""

    def __init__(self, vector: Tensor) -> None:
        self.vector, self.at = vector, 0

    def take(self, like: Tensor) -> Tensor:
        self.at += like.numel()
        return self.vector[self.at - like.numel() : self.at].reshape(like.shape).to(like.dtype)


def _filled(tree: Tree, vector: Pieces, numbers: Iterator[float]) -> Tree:
    """The same tree with these numbers."""
    if isinstance(tree, Tensor):
        return vector.take(tree) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {k: _filled(t, vector, numbers) for k, t in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(t, vector, numbers) for t in tree)
    if _is_number(tree):
        return type(tree)(next(numbers))
    return tree
