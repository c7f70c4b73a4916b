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

LIMB = 21  # bits: products of two limbs, summed over up to 600 terms, are exact in float64
CHUNK = 2**14  # columns in one product, so that its limbs stay in the cache


def _reduce(x: Field) -> Field:
    x = (x & np.uint64(P)) + (x >> np.uint64(61))
    return np.where(x >= P, x - np.uint64(P), x)


def _shifted(x: Field, bits: int) -> Field:
    """x 2^bits mod p for x < 2^61: a rotation of 61 bits."""
    bits %= 61
    low = np.uint64(2 ** (61 - bits) - 1)
    return ((x & low) << np.uint64(bits)) | (x >> np.uint64(61 - bits))


def _limbs(x: Field) -> list[Tensor]:
    mask = np.uint64(2**LIMB - 1)
    return [torch.from_numpy(((x >> np.uint64(LIMB * k)) & mask).astype(np.float64)) for k in range(3)]


def combine(matrix: Sequence[Sequence[int]], rows: Field) -> Field:
    """matrix @ rows mod p, (n, t) @ (t, columns), as nine products of limbs in float64, which are exact.

    >>> combine([[2, P - 1]], np.array([[3], [5]], dtype=np.uint64)).tolist()  # 2 x 3 - 5
    [[1]]
    """
    left = _limbs(np.array(matrix, dtype=np.uint64))
    total = np.empty((len(matrix), rows.shape[1]), dtype=np.uint64)
    for start in range(0, rows.shape[1], CHUNK):
        right = _limbs(rows[:, start : start + CHUNK])
        part = np.zeros((len(matrix), right[0].shape[1]), dtype=np.uint64)
        for weight in range(5):  # products of limbs a and b count 2^(LIMB (a + b))
            product = sum(left[a] @ right[weight - a] for a in range(3) if 0 <= weight - a < 3)
            assert isinstance(product, Tensor)
            part = _reduce(part + _shifted(product.numpy().astype(np.uint64), LIMB * weight))
        total[:, start : start + CHUNK] = part
    return total


def to_field(x: Tensor, parties: int, fraction: int = FRACTION, drop: int = 0) -> Field:
    """round(x 2^fraction) / 2^drop, rounded down, as an element of the field; -x is represented by p - x.

    Refused if a sum over this many parties, each multiplied by up to 2^drop, could overflow.
    """
    limit = 2.0 ** (59 - fraction) / max(parties, 1)
    if not bool((x.abs() < limit).all()):
        raise Overflow(f"a number beyond {limit:.3g} cannot be shared among {parties} with {fraction} fractional bits")
    whole = ((x.double() * 2.0**fraction).round().to(torch.int64) >> drop).numpy()
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
    """Shares 1..n of a vector. Any `threshold` of them give x."""
    if not 1 <= threshold <= parties:
        raise ValueError(f"a threshold of {threshold} for {parties} parties")
    coefficients = np.concatenate([x[None], _random_field((threshold - 1, *x.shape))])
    powers = [[pow(at, k, P) for k in range(threshold)] for at in range(1, parties + 1)]
    return list(combine(powers, coefficients))


def recover(shares: Mapping[int, Field]) -> Field:
    """x from enough shares, keyed by their numbers 1..n (Lagrange interpolation at 0)."""
    weights = []
    for j in shares:
        weight = 1
        for m in shares:
            if m != j:
                weight = weight * m * pow(m - j, -1, P) % P
        weights.append(weight)
    total: Field = combine([weights], np.stack(list(shares.values())))[0]
    return total
