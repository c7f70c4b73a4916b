"""The format in which trees are sent and stored: a safetensors file of arrays and plain values, never pickles.

A letter is 8 bytes of header length (little-endian), a JSON header, and the arrays end to end (the safetensors format). The
header's `__metadata__["tree"]` is JSON that describes how the arrays and plain values nest:

    tensor  {"t": name}     tuple  {"u": [...]}     list  [...]     dict  {"d": {...}}     bytes  {"b": base64}
    AtNodes {"at": "nodes"} None, bool, int, float, str as themselves

Decoding checks every offset, size and dtype before it copies an array; whatever safetensors refuses is refused here, too.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kilter.core import AtNodes, Tree
from kilter.errors import Malformed as Malformed
from kilter.fast import foreach
from kilter.trees import leaves, not_finite, signature

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH = {name: dtype for dtype, name in DTYPES.items()}
DEPTH = 32  # how deep a tree may nest
PLAIN = {bool, int, float, str, type(None)}  # types that JSON represents as they are, if finite


def pack(tree: Tree, path: str, arrays: dict[str, Tensor], depth: int = 0) -> Any:
    """The structure of a tree as JSON. Its tensors go into `arrays`, under names that begin with `path`."""
    if depth > DEPTH:
        raise TypeError(f"a tree of more than {DEPTH} levels cannot be sent or kept")
    if isinstance(tree, Tensor):
        if tree.dtype not in DTYPES:
            raise TypeError(f"a {tree.dtype} tensor cannot be sent")
        arrays[path] = tree
        return {"t": path}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"f": repr(tree)}
    if isinstance(tree, tuple):
        return {"u": [pack(v, f"{path}/{i}", arrays, depth + 1) for i, v in enumerate(tree)]}
    if isinstance(tree, list):
        if PLAIN.issuperset(map(type, tree)) and all(math.isfinite(v) for v in tree if type(v) is float):
            return tree  # ten times as fast for a long list
        return [pack(v, f"{path}/{i}", arrays, depth + 1) for i, v in enumerate(tree)]
    if isinstance(tree, Mapping):
        if not all(isinstance(k, str) for k in tree):
            raise TypeError("keys of what is sent or kept must be strings")
        return {"d": {k: pack(v, f"{path}/{_escaped(k)}", arrays, depth + 1) for k, v in tree.items()}}
    if isinstance(tree, bytes):
        return {"b": base64.b64encode(tree).decode()}
    if isinstance(tree, AtNodes):
        return {"at": "nodes"}
    raise TypeError(
        f"a {type(tree).__name__} cannot be sent or kept: only tensors, plain values, dicts, lists and tuples"
    )


def _escaped(key: str) -> str:
    """A key without slashes, so that every place in a tree has a name of its own."""
    return key.replace("%", "%25").replace("/", "%2F")


def unpack(spec: Any, arrays: Mapping[str, Tensor], depth: int = 0) -> Tree:
    """The tree that `pack` described."""
    if depth > DEPTH:
        raise Malformed("a letter nests too deeply")
    if isinstance(spec, list):
        if PLAIN.issuperset(map(type, spec)):
            return spec
        return [unpack(v, arrays, depth + 1) for v in spec]
    if not isinstance(spec, dict):
        return spec
    (tag, value), *more = spec.items() if spec else (("", None),)
    if not more:
        if tag == "t" and isinstance(value, str) and value in arrays:
            return arrays[value]
        if tag == "u" and isinstance(value, list):
            return tuple(unpack(v, arrays, depth + 1) for v in value)
        if tag == "d" and isinstance(value, dict):
            return {k: unpack(v, arrays, depth + 1) for k, v in value.items()}
        if tag == "f" and value in ("nan", "inf", "-inf"):
            return float(value)
        if tag == "b" and isinstance(value, str):
            return base64.b64decode(value, validate=True)
        if tag == "at" and value == "nodes":
            return AtNodes()
    raise Malformed("a letter's structure is not ours")


def _header(tree: Tree) -> tuple[bytes, list[Tensor]]:
    """The header of a letter, not yet padded, and its arrays in order."""
    arrays: dict[str, Tensor] = {}
    spec = pack(tree, "", arrays)
    # Larger items first, as safetensors requires: then every array starts aligned.
    order = sorted(arrays, key=lambda name: -arrays[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(spec, separators=(",", ":"))}}
    at = 0
    for name in order:
        array = arrays[name]
        end = at + array.numel() * array.element_size()
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    return json.dumps(header, separators=(",", ":")).encode(), [arrays[name] for name in order]


def _padded(length: int) -> int:
    return -(-length // 8) * 8


def size(tree: Tree) -> int:
    """The number of bytes that `encode` would return; 0 for None."""
    if tree is None:
        return 0
    header, arrays = _header(tree)
    return 8 + _padded(len(header)) + sum(a.nbytes for a in arrays)


def encode(tree: Tree, checked: bool = False) -> bytes:
    """A tree as bytes; `checked` adds a checksum of everything, which `decode` verifies."""
    text, arrays = _header(tree)
    # reshape before view: a 0-dimensional tensor cannot be viewed as bytes
    flat = [a.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data for a in arrays if a.numel()]
    if checked:
        header = json.loads(text)
        header["__metadata__"]["checksum"] = _checksum(text, flat)
        text = json.dumps(header, separators=(",", ":")).encode()
    padded = text.ljust(_padded(len(text)))
    return b"".join([len(padded).to_bytes(8, "little"), padded, *flat])


def _checksum(text: bytes, arrays: Iterable[bytes | memoryview]) -> str:
    digest = blake2b(text, digest_size=16)
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def decode(data: bytes | mmap.mmap) -> Tree:
    """The tree behind these bytes; `Malformed` if they are not a letter."""
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or not 2 <= length <= len(data) - 8:
            raise Malformed("a letter's header is cut off")
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
        metadata = header.pop("__metadata__")
        if not isinstance(metadata, dict) or not set(metadata) <= {"tree", "checksum"}:
            raise Malformed("a letter's structure is not ours")
        with memoryview(data) as view:
            known = metadata.pop("checksum", None)
            if known is not None:
                text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
                if known != _checksum(text, [view[8 + length :]]):
                    raise Malformed("a file was altered after it was written")
            arrays = _arrays(header, view[8 + length :])
        return unpack(json.loads(metadata["tree"]), arrays)
    except Malformed:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        raise Malformed(f"a letter cannot be read ({type(e).__name__})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name occurs twice."""
    if len(table := dict(pairs)) < len(pairs):
        raise Malformed("a letter's header has a name twice")
    return table


def _arrays(header: Mapping[str, Any], data: memoryview) -> dict[str, Tensor]:
    """The arrays, each copied once. As in safetensors, they lie end to end and fill the rest of the letter."""
    arrays: dict[str, Tensor] = {}
    at = 0
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if set(info) != {"dtype", "shape", "data_offsets"}:
            raise Malformed("a letter's array is not described")
        dtype, shape, (start, end) = TORCH[info["dtype"]], info["shape"], info["data_offsets"]
        if len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**48 for n in (*shape, start, end)):
            raise Malformed("a letter's array has an impossible shape")
        if start != at or not start <= end <= len(data) or math.prod(shape) * dtype.itemsize != end - start:
            raise Malformed("a letter's arrays do not fit")
        # Into torch's own memory: kernels may round otherwise where an array begins at another alignment.
        array = torch.empty(math.prod(shape), dtype=dtype)
        if end > start:
            array.view(torch.uint8).numpy()[:] = np.frombuffer(data[start:end], dtype=np.uint8)
        arrays[name], at = array.reshape(shape), end
    if at != len(data):
        raise Malformed("a letter is longer than its arrays")
    return arrays


class Facts(NamedTuple):
    """What a receiver checks before it uses a tree."""

    size: int  # bytes
    signature: tuple[Any, ...]
    norm: float  # the Euclidean norm of all its floating-point arrays together
    bad: str | None  # where it is not finite


class _Known(NamedTuple):
    """What trees of the same outline have in common."""

    text: int  # bytes of the header without the digits of plain numbers
    arrays: int  # bytes of the arrays
    signature: tuple[Any, ...]
    finite: bool  # whether its plain values are


_known: dict[Any, _Known] = {}
KNOWN = 256  # most outlines in the cache


def facts(tree: Tree) -> Facts:
    """The facts of one tree.

    >>> facts(({"w": torch.tensor([3.0])}, {"v": torch.tensor([4.0])}, 12)).norm
    5.0
    """
    return facts_each([tree])[0]


def facts_each(trees: Sequence[Tree]) -> list[Facts]:
    """The facts of many trees, faster than one by one: trees that differ only in their numbers are measured once."""
    measured: list[tuple[int, tuple[Any, ...], bool]] = []
    numbers: list[Tensor] = []
    ends = []
    for tree in trees:
        arrays: list[Tensor] = []
        plain: list[float] = []
        outline = _outline(tree, arrays, plain)
        digits = sum([len(repr(v)) for v in plain])
        known = _known.get(outline)
        if known is None:
            text, held = _header(tree)
            finite = all(math.isfinite(leaf) for _, leaf in leaves(tree) if isinstance(leaf, float))
            known = _Known(len(text) - digits, sum(a.nbytes for a in held), signature(tree), finite)
            if len(_known) >= KNOWN:
                _known.clear()
            _known[outline] = known
        bytes = 8 + _padded(known.text + digits) + known.arrays if tree is not None else 0
        measured.append((bytes, known.signature, known.finite))
        numbers += [a for a in arrays if a.is_floating_point() and a.numel()]
        ends.append(len(numbers))
    norms = torch.stack(foreach.norm(numbers)).tolist() if numbers else []
    all_facts = []
    for tree, (bytes, shape, finite), begin, end in zip(trees, measured, [0, *ends], ends, strict=False):
        norm = math.hypot(*norms[begin:end])
        # The norm of finite numbers may overflow: then check every number, which takes 4 to 20 times as long.
        all_facts.append(Facts(bytes, shape, norm, None if finite and math.isfinite(norm) else not_finite(tree)))
    return all_facts


def _outline(tree: Tree, arrays: list[Tensor], plain: list[float]) -> Any:
    """A key that is equal for trees that differ only in numbers. Arrays and finite plain numbers are collected."""
    kind = type(tree)
    if kind is int or (kind is float and math.isfinite(tree)):
        plain.append(tree)
        return kind
    if isinstance(tree, Tensor):
        arrays.append(tree)
        return tree.dtype, tree.shape
    if kind is dict or isinstance(tree, Mapping):
        return dict, tuple(tree), tuple([_outline(v, arrays, plain) for v in tree.values()])
    if isinstance(tree, list | tuple):
        return kind, tuple([_outline(v, arrays, plain) for v in tree])
    return kind, repr(tree) if isinstance(tree, int | float | str | bytes) else id(kind)
