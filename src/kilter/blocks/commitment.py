"""Commitments: announce a value before you see another's, and reveal it afterwards. A hash of the value and a secret number."""

from __future__ import annotations

from hashlib import blake2b

from torch import Tensor


def commitment(value: Tensor, nonce: int) -> str:
    """The hash of these numbers and of a nonce that only the sender knows until it reveals both.

    >>> import torch
    >>> commitment(torch.tensor([1, 2]), 7) == commitment(torch.tensor([1, 2]), 7)
    True
    """
    return blake2b(repr((value.tolist(), nonce)).encode(), digest_size=32).hexdigest()
