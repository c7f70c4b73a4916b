"""Random damage: to bytes, to JSON, to trees."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

TOKENS = [b"[", b"{", b'"', b"9" * 20, b"-1", b"null", b"true", b"1e999", b"\\u0000", b"\x00", b"\xff"]


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, cut, splice and grow."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if out:
                out[min(at, len(out) - 1)] = rng.randrange(256)
            case 1:
                del out[at : at + rng.randint(1, 20)]
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                out[at:at] = out[at // 2 : at]
            case _:
                out[at : at + 1] = rng.choice(TOKENS)
    return bytes(out)


def flip_bit(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def strange(rng: Random, depth: int = 0) -> Any:
    """A plain value that nobody expects, and JSON can carry."""
    match rng.randrange(10 if depth < 3 else 8):
        case 0:
            return None
        case 1:
            return rng.choice([True, False])
        case 2:
            return rng.choice([0, -1, 1, 2**31, 2**63, -(2**63), 10**15, 10**400])
        case 3:
            return rng.choice([0.0, -0.5, 1e308, 1e-308])
        case 4:
            return rng.choice(
                ["", "train", "server", "a", "../..", "x" * 1000, "a\nb", "\x00", "é", "~took", ":evaluate"]
            )
        case 5:
            return "0" * rng.choice([8, 32, 64, 65])
        case 6 | 7:
            return rng.randrange(-3, 10)
        case 8:
            return [strange(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            keys = ["a", "b", "c", "round", "step", "public", "listens", "loss", "x"]
            return {rng.choice(keys): strange(rng, depth + 1) for _ in range(rng.randrange(4))}


def mutate_head(rng: Random, head: dict[str, Any]) -> dict[str, Any]:
    """Some fields changed, missing or added."""
    out = dict(head)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*out, "other"])
        if rng.random() < 0.25:
            out.pop(key, None)
        else:
            out[key] = strange(rng)
    return out


def strange_tree(rng: Random, like: Any) -> Any:
    """A tree of tensors and values: like an honest one with something wrong, or anything at all."""
    match rng.randrange(8):
        case 0:
            return strange(rng)
        case 1:
            return torch.full((rng.randrange(4), rng.randrange(4)), rng.choice([0.0, 1e30, float("nan"), float("inf")]))
        case 2 if isinstance(like, dict) and like:
            return {**like, rng.choice(list(like)): strange(rng)}
        case 3 if isinstance(like, dict) and like:
            return {k: v for k, v in like.items() if k != rng.choice(list(like))}
        case 4 if isinstance(like, dict):
            return {k: v * 1e9 if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in like.items()}
        case 5:
            return (like, strange(rng))
        case 6:
            return [like]
        case _:
            return like
