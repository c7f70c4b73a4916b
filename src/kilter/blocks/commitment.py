"""Commitments: announce a value before you see another's, and reveal it afterwards. A hash of the value and a secret number."""

from __future__ import annotations

from hashlib import blake2b

from torch import Tensor


def commitment(value: Tensor, nonce: int, sender: str) -> str:
    """The hash of these numbers, of a nonce that only the sender knows until it reveals both, and of the sender's name.

    With the name in it, nobody can pass off another's commitment as its own and later repeat what the other reveals.

    >>> import torch
    >>> commitment(torch.tensor([1, 2]), 7, "a") == commitment(torch.tensor([1, 2]), 7, "a")
    True
    """
    return blake2b(repr((value.tolist(), nonce, sender)).encode(), digest_size=32).hexdigest()
