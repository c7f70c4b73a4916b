"""Secret shares of numbers. Any incomplete set of shares is uniformly random, and the sum of shares is a share of the sum.

Ring shares (`split`, `join`): a number x becomes the integer round(x 2^f) modulo 2^64. n - 1 shares are drawn uniformly from the
ring, and the last is the difference. Random numbers come from the operating system, not from the run's seed, which everybody
knows. Results do not depend on them, because the sum is exact.

Threshold shares (`deal`, `recover`): Shamir's scheme in the field of the prime p = 2^61 - 1. The shares are the values at 1..n of a
random polynomial of degree t - 1 whose value at 0 is the number. Any t shares give the number; any t - 1 are uniformly random.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.core import Params

FRACTION = 32  # fractional bits: numbers are exact to 2^-33
P = 2**61 - 1  # a Mersenne prime: reduction is a shift and an add
Field = NDArray[np.uint64]


class Overflow(ValueError):
    """A number is too large to be shared. Nothing was sent."""


def uniform(shape: Sequence[int]) -> Tensor:
    """Uniform 64-bit integers from the operating system's entropy."""
    n = int(np.prod(shape, dtype=np.int64))
    return torch.frombuffer(bytearray(secrets.token_bytes(8 * max(n, 1))), dtype=torch.int64)[:n].reshape(tuple(shape))


def to_ring(x: Tensor, parties: int, fraction: int = FRACTION) -> Tensor:
    """x as an integer modulo 2^64; refused if a sum over this many parties could overflow."""
    limit = 2.0 ** (62 - fraction) / max(parties, 1)
    if not bool((x.abs() < limit).all()):
        raise Overflow(f"a number beyond {limit:.3g} cannot be shared among {parties} with {fraction} fractional bits")
    return (x.double() * 2.0**fraction).round().to(torch.int64)


def from_ring(x: Tensor, fraction: int = FRACTION) -> Tensor:
    """Back from the ring, as float64."""
    return x.double() / 2.0**fraction


def split(x: Tensor, parties: int) -> list[Tensor]:
    """Shares of an integer tensor; the first is the owner's. All are needed to recover it."""
    masks = [uniform(x.shape) for _ in range(parties - 1)]
    own = x.clone()
    for mask in masks:
        own -= mask  # modulo 2^64: int64 wraps
    return [own, *masks]


def join(shares: Sequence[Tensor]) -> Tensor:
    """The sum of shares."""
    total = torch.zeros_like(shares[0])
    for share in shares:
        total += share
    return total


def scalar_shares(x: Params, parties: int, rng: torch.Generator) -> list[Params]:
    """Random fractions of each layer that sum to one, as printed in SLFed. They hide nothing but a scale factor."""
    fractions = {name: torch.rand(parties, generator=rng) for name in x}
    return [{name: v * (fractions[name][k] / fractions[name].sum()) for name, v in x.items()} for k in range(parties)]


# Threshold shares -------------------------------------------------------------------------------------------------------


def _reduce(x: Field) -> Field:
    x = (x & np.uint64(P)) + (x >> np.uint64(61))
    return np.where(x >= P, x - np.uint64(P), x)


def _times(a: Field, b: Field | np.uint64) -> Field:
    """a b mod p for a, b < p, in 64 bits: a = a1 2^31 + a0, and 2^61 = 1."""
    low, high = np.uint64(2**31 - 1), np.uint64(31)
    a1, a0 = a >> high, a & low
    b1, b0 = b >> high, b & low
    middle = _reduce(_reduce(a1 * b0) + _reduce(a0 * b1))  # times 2^31
    # middle 2^31 = (middle >> 30) 2^61 + (middle & (2^30 - 1)) 2^31
    shifted = (middle >> np.uint64(30)) + ((middle & np.uint64(2**30 - 1)) << high)
    # a1 b1 2^62 = 2 a1 b1
    return _reduce(_reduce(_reduce(a1 * b1) * np.uint64(2)) + _reduce(shifted) + _reduce(a0 * b0))


def to_field(x: Tensor, parties: int, fraction: int = FRACTION) -> Field:
    """x as an element of the field; -x is represented by p - x."""
    limit = 2.0 ** (59 - fraction) / max(parties, 1)
    if not bool((x.abs() < limit).all()):
        raise Overflow(f"a number beyond {limit:.3g} cannot be shared among {parties} with {fraction} fractional bits")
    whole = (x.double() * 2.0**fraction).round().to(torch.int64).numpy()
    return np.where(whole < 0, whole + P, whole).astype(np.uint64)


def from_field(x: Field, fraction: int = FRACTION) -> Tensor:
    signed = np.where(x > P // 2, x.astype(np.int64) - P, x.astype(np.int64))
    return torch.from_numpy(signed).double() / 2.0**fraction


def _random_field(shape: Sequence[int]) -> Field:
    """Uniform in 0..p-1: 61 random bits; the one value that is too large is drawn again."""
    drawn = uniform(shape).numpy().view(np.uint64) & np.uint64(P)
    while bool((again := drawn == P).any()):
        drawn = np.where(again, uniform(shape).numpy().view(np.uint64) & np.uint64(P), drawn)
    return drawn


def field_sum(parts: Sequence[NDArray[np.int64]] | Sequence[Field]) -> NDArray[np.int64]:
    """The sum of field elements, as int64, the type on the wire."""
    total = np.zeros_like(parts[0], dtype=np.uint64)
    for part in parts:
        total = _reduce(total + part.view(np.uint64))
    return total.view(np.int64)


def deal(x: Field, parties: int, threshold: int) -> list[Field]:
    """Shares 1..n. Any `threshold` of them give x."""
    if not 1 <= threshold <= parties:
        raise ValueError(f"a threshold of {threshold} for {parties} parties")
    coefficients = [_random_field(x.shape) for _ in range(threshold - 1)]
    shares = []
    for at in range(1, parties + 1):
        value = np.zeros_like(x)
        for c in reversed(coefficients):
            value = _reduce(_times(_reduce(value + c), np.uint64(at)))
        shares.append(_reduce(value + x))
    return shares


def recover(shares: Mapping[int, Field]) -> Field:
    """x from enough shares, keyed by their numbers 1..n (Lagrange interpolation at 0)."""
    total: Field | None = None
    for j, share in shares.items():
        weight = 1
        for m in shares:
            if m != j:
                weight = weight * m * pow(m - j, -1, P) % P
        part = _times(share, np.uint64(weight % P))
        total = part if total is None else _reduce(total + part)
    assert total is not None
    return total
