"""Chance, derived from what it is for and never from a running stream.

A number drawn for (seed, round, node, step) is the same whatever the number of workers, the order of clients, or a restart.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from its purpose, e.g. `derive(seed, "partition")` or `derive(seed, round, node, step)`.

    >>> derive(0, 1, "a", "train") == derive(0, 1, "a", "train")
    True
    >>> derive(0, 1, "a", "train") == derive(0, 11, "", "atrain")
    False
    """
    text = "\x1f".join([f"{type(p).__name__}:{p}" for p in parts])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(*parts))


def numpy_generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(*parts))
