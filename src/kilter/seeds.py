"""Random numbers, derived from their purpose and never from a running stream.

Numbers for (seed, round, node, step) are the same for any number of workers, any order of clients, and after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch

SEPARATOR = b"\x1f"


def derive(*parts: int | str) -> int:
    """A 63-bit seed for a purpose, e.g. `derive(seed, "partition")` or `derive(seed, round, node, step)`.

    >>> derive(0, 1, "a", "train") == derive(0, 1, "a", "train")
    True
    >>> derive(0, 1, "a", "train") == derive(0, 11, "", "atrain")
    False
    """
    return int.from_bytes(blake2b(_text(parts), digest_size=8).digest(), "little") >> 1


def derive_each(before: Sequence[int | str], names: Iterable[str], *after: int | str) -> np.ndarray:
    """[derive(*before, name, *after) for name in names], four times as fast.

    >>> derive_each([0, 1], ["a", "b"], "train").tolist() == [derive(0, 1, i, "train") for i in "ab"]
    True
    """
    start, end = blake2b(_text(before) + SEPARATOR, digest_size=8).copy, SEPARATOR + _text(after)
    digests = []
    for name in names:
        own = start()
        own.update(b"str:" + name.encode() + end)
        digests.append(own.digest())
    return np.frombuffer(b"".join(digests), "<u8") >> np.uint64(1)


def _text(parts: Iterable[int | str]) -> bytes:
    return SEPARATOR.join([f"{type(p).__name__}:{p}".encode() for p in parts])


def generator(*parts: int | str) -> torch.Generator:
    """A torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(*parts))


@lru_cache(maxsize=4)
def draw_partners(names: tuple[str, ...], count: int, seed: int, round: int) -> dict[str, set[str]]:
    """The others that each node draws in this round. Everyone can compute it, so it is computed once for all.

    >>> {name: len(others) for name, others in draw_partners(("a", "b", "c"), 2, 0, 1).items()}
    {'a': 2, 'b': 2, 'c': 2}
    """
    drawn = {}
    for at, name in enumerate(names):
        others = names[:at] + names[at + 1 :]
        order = torch.randperm(len(others), generator=generator(seed, round, name, "subset"))
        drawn[name] = {others[k] for k in order[:count].tolist()}
    return drawn


def numpy_generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(*parts))
