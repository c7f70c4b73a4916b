"""Trees: nested dicts, lists and tuples of tensors and plain values. What a node may keep, send and checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kilter.core import Tree


def tensors(tree: Tree) -> list[Tensor]:
    """All tensors of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for v in tree.values() for t in tensors(v)]
    return [t for v in tree for t in tensors(v)] if isinstance(tree, list | tuple) else []


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """(path, leaf) of every tensor and plain value."""
    if isinstance(tree, Mapping):
        for k, v in tree.items():
            yield from leaves(v, f"{path}.{k}" if path else str(k))
    elif isinstance(tree, list | tuple):
        for i, v in enumerate(tree):
            yield from leaves(v, f"{path}.{i}" if path else str(i))
    else:
        yield path, tree


def structure(tree: Tree) -> object:
    """How a tree nests: its dicts with their keys, its lists and tuples; None for every leaf."""
    if isinstance(tree, Mapping):
        return ("dict", *((k, structure(v)) for k, v in tree.items()))
    if isinstance(tree, list | tuple):
        return ("list" if isinstance(tree, list) else "tuple", *map(structure, tree))
    return None


def signature(tree: Tree) -> tuple[object, ...]:
    """Shape of a tree: paths, dtypes and shapes, plain values by their type; and last how it nests."""
    shapes = (
        (path, str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, Tensor) else (path, type(leaf).__name__)
        for path, leaf in leaves(tree)
    )
    return *shapes, structure(tree)


def not_finite(tree: Tree) -> str | None:
    """The path of the first NaN or infinity, if there is one."""
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                return path or "its value"
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            return path or "its value"
    return None
