"""The wire: everything that may be sent comes back, nothing else gets in, and sizes are what is sent."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kilter
from kilter.core import AtNodes
from kilter.records import wire
from kilter.records.wire import DEPTH, DTYPES, Malformed, decode, encode, size
from kilter.trees import not_finite, signature
from small import same

DTYPE = st.sampled_from(list(DTYPES))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any dtype: 0-dimensional, empty, transposed."""
    dtype = draw(DTYPE)
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    n = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=n, max_size=n))
    if dtype == torch.bool:
        raw = bytes(b & 1 for b in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if n else torch.empty(0, dtype=dtype)
    made = flat.reshape(shape)
    return made.transpose(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 2**70])
)
keys = st.text(max_size=4) | st.sampled_from(
    ["", "/", "//", "a/b", "~bn.running_mean", "__metadata__", "é/中", "%2F", "t"]
)
trees = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(trees)
@example({"a": {"/b": torch.ones(1)}, "a/": {"b": torch.zeros(2)}})  # two places, once one name
@example({"a/": torch.ones(1), "a": {"": {"": torch.zeros(2)}}})
@example({"t": "x", "u": ["y"]})  # looks like our own marks
@example({"0": torch.ones(1), "1": (torch.zeros(1), [torch.ones(())])})
def test_what_is_sent_comes_back(tree: Any) -> None:
    data = encode(tree)
    assert same(decode(data), tree)
    if tree is not None:
        assert size(tree) == len(data)


def test_nothing_to_say_costs_nothing() -> None:
    assert size(None) == 0
    assert decode(encode(None)) is None


@given(st.dictionaries(keys, tensors(), min_size=1, max_size=4))
def test_a_letter_is_a_safetensors_file(tree: dict[str, torch.Tensor]) -> None:
    actual = safetensors.torch.load(encode(tree))
    assert len(actual) == len(tree)
    assert sorted(map(repr, (same_key(v) for v in actual.values()))) == sorted(map(repr, map(same_key, tree.values())))


def same_key(t: torch.Tensor) -> tuple[Any, ...]:
    return str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else []


def test_arrays_start_aligned() -> None:
    tree = {"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(3)}
    data = encode(tree)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, info in header.items():
        if name != "__metadata__":
            assert info["data_offsets"][0] % wire.TORCH[info["dtype"]].itemsize == 0


def test_names_in_the_file_are_readable() -> None:
    actual = safetensors.torch.load(encode({"state": ({"~bn.mean": torch.ones(1), "w": torch.ones(1)},)}))
    assert set(actual) == {"/state/0/~bn.mean", "/state/0/w"}


def test_views_gradients_and_other_mappings_travel_as_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    leaf = torch.ones(2, requires_grad=True)
    actual = decode(encode(OrderedDict(view=base[:, 1], leaf=leaf, expanded=torch.ones(1).expand(3))))
    assert actual["view"].tolist() == [1, 5, 9]
    assert actual["leaf"].tolist() == [1, 1]
    assert not actual["leaf"].requires_grad
    assert actual["expanded"].tolist() == [1, 1, 1]
    assert type(actual) is dict


def test_state_at_nodes_travels() -> None:
    assert isinstance(decode(encode({"state": AtNodes()}))["state"], AtNodes)


def test_what_is_decoded_can_be_written_to() -> None:
    data = encode([torch.ones(3)])
    (actual,) = decode(data)
    actual += 1
    assert decode(data)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "foreign",
    [{1: 2}, {("a",): 1}, object(), {1, 2}, 1j, lambda: 0, torch.ones(1, dtype=torch.complex64), range(3)],
    ids=lambda f: type(f).__name__,
)
def test_anything_else_cannot_be_sent(foreign: Any) -> None:
    for of in (encode, size):
        with pytest.raises(TypeError):
            of({"message": [foreign]})


def nested(levels: int) -> Any:
    tree: Any = torch.ones(1)
    for k in range(levels):
        tree = ([tree], (tree,), {"k": tree})[k % 3]
    return tree


def test_depth_is_limited_alike_both_ways() -> None:
    assert same(decode(encode(nested(DEPTH))), nested(DEPTH))
    with pytest.raises(TypeError):  # otherwise a checkpoint could be written that cannot be read
        encode(nested(DEPTH + 1))
    for levels in (DEPTH + 2, 5000, 200_000):
        with pytest.raises(Malformed):
            decode(letter("[" * levels + "]" * levels))


# Malformed ------------------------------------------------------------------------------------------------------------


def letter(tree: str, header: dict[str, Any] | None = None, data: bytes = b"") -> bytes:
    """A letter by hand."""
    text = json.dumps({"__metadata__": {"tree": tree}} | (header or {})).encode()
    return len(text).to_bytes(8, "little") + text + data


def refuses_or_reads(data: bytes) -> None:
    try:
        tree = decode(data)
    except Malformed:
        return
    assert size(tree) >= 0  # a tree of ours: it can be sent again


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff" * 8)
@example(b"\xff" * 7 + b"\x7f{}")
def test_random_bytes(data: bytes) -> None:
    refuses_or_reads(data)


@given(st.text(alphabet='{}[]":,tudfb0129a.eE-n "', max_size=30))
def test_random_trees(text: str) -> None:
    refuses_or_reads(letter(text))


LETTER = encode({"w": torch.arange(3.0), "n": (3, None, 2.5, b"ab"), "é/": [torch.tensor(7), torch.empty(0, 2)]})


def test_every_truncation_is_refused() -> None:
    for cut in range(len(LETTER)):
        with pytest.raises(Malformed):
            decode(LETTER[:cut])
    with pytest.raises(Malformed):
        decode(LETTER + b"\0")


def test_every_flipped_bit_is_refused_or_read() -> None:
    for at in range(len(LETTER)):
        for bit in range(8):
            refuses_or_reads(LETTER[:at] + bytes([LETTER[at] ^ 1 << bit]) + LETTER[at + 1 :])


@given(st.lists(st.tuples(st.integers(0, len(LETTER) - 1), st.integers(0, 255)), max_size=8))
def test_bytes_overwritten(changes: list[tuple[int, int]]) -> None:
    data = bytearray(LETTER)
    for at, byte in changes:
        data[at] = byte
    refuses_or_reads(bytes(data))


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        letter('{"t":"nowhere"}'),
        letter('{"t":["x"]}'),
        letter('{"u":{"a":1}}'),
        letter('{"d":[1]}'),
        letter('{"f":"3"}'),
        letter('{"f":["nan"]}'),
        letter('{"b":"***"}'),
        letter('{"b":3}'),
        letter('{"at":"home"}'),
        letter("{}"),
        letter('{"t":"x","u":[]}', {"x": F32}, b"\0" * 4),
        letter('{"x":1}'),
        letter("["),
        letter("9" * 5000),
        letter('{"t":"x"}', {"x": F32 | {"dtype": "F8_E4M3", "data_offsets": [0, 1]}}, b"\0"),
        letter('{"t":"x"}', {"x": F32 | {"shape": [2]}}, b"\0" * 4),
        letter('{"t":"x"}', {"x": F32 | {"shape": [-1]}}, b"\0" * 4),
        letter('{"t":"x"}', {"x": F32 | {"shape": [2**62, 4]}}, b"\0" * 4),
        letter('{"t":"x"}', {"x": F32 | {"shape": [0, 2**63], "data_offsets": [0, 0]}}),
        letter('{"t":"x"}', {"x": F32 | {"data_offsets": [4, 8]}}, b"\0" * 8),
        letter('{"t":"x"}', {"x": F32, "y": F32}, b"\0" * 4),
        letter("1", {"__metadata__": {}}),
        letter("1", {"__metadata__": None}),
        letter("1", {"__metadata__": {"tree": 1}}),
        safetensors.torch.save({"w": torch.ones(2)}),
    ],
)
def test_structures_that_are_not_ours(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


# What a runtime asks of a reply --------------------------------------------------------------------------------------


def test_signature_tells_shapes_dtypes_names_and_kinds_apart() -> None:
    base = {"w": torch.ones(2, 3), "n": 1}
    others = [
        {"w": torch.ones(3, 2), "n": 1},
        {"w": torch.ones(2, 3).double(), "n": 1},
        {"v": torch.ones(2, 3), "n": 1},
        {"w": torch.ones(2, 3), "n": 1.0},
        {"w": torch.ones(2, 3)},
        {"w": torch.ones(2, 3), "n": 1, "m": {}},
        {"w": [torch.ones(2, 3)], "n": 1},
        {"w": (torch.ones(2, 3),), "n": 1},
        {"w": {"0": torch.ones(2, 3)}, "n": 1},
        {"w.0": torch.ones(2, 3), "n": 1},
    ]
    actual = {signature(t) for t in [base, *others]}
    assert len(actual) == len(others) + 1
    assert signature({"w": torch.zeros(2, 3), "n": 2}) == signature(base)


def test_not_finite_names_the_first_place() -> None:
    good = {"w": torch.ones(2), "n": (1.0, [2, "nan"]), "i": torch.tensor([2**60]), "none": None}
    assert not_finite(good) is None
    assert not_finite(good | {"n": (1.0, [float("nan")])}) == "n.1.0"
    assert not_finite(good | {"w": torch.tensor([1.0, float("-inf")])}) == "w"
    assert not_finite(torch.tensor(float("nan"))) == "its value"
    assert not_finite(float("inf")) == "its value"


@given(trees)
def test_one_look_sees_what_many_would(tree: object) -> None:
    for _ in range(2):  # the second time its outline is known
        actual = wire.facts(tree)
        assert (actual.size, actual.signature) == (0 if tree is None else len(wire.encode(tree)), signature(tree))
        assert actual.bad == not_finite(tree)


def test_one_look_does_not_mistake_trees_for_each_other() -> None:
    alike = [
        {"w": torch.ones(2), "n": n} for n in (1, 1.0, True, 10, "1", None, b"1", [1], (1,), -0.0, 0.0, float("nan"))
    ]
    alike += [{"w": torch.ones(2).double(), "n": 1}, {"v": torch.ones(2), "n": 1}, {"w": torch.ones(3), "n": 1}]
    for tree in alike * 2:
        assert wire.facts(tree)[:2] == (len(wire.encode(tree)), signature(tree))
        assert wire.facts(tree).bad == not_finite(tree)


def test_numbers_whose_squares_overflow_are_still_finite() -> None:
    assert wire.facts({"w": torch.tensor([1e30, -1e30])}).bad is None
    assert wire.facts({"w": torch.tensor([1e30, torch.nan])}).bad == "w"


# No pickles -----------------------------------------------------------------------------------------------------------

SOURCES = sorted(Path(kilter.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_no_pickle_in_the_source(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*(import|from)\s+(pickle|cloudpickle|dill|joblib|marshal|shelve)\b", text, re.M)
    assert not re.search(r"\ballow_pickle\s*=\s*True", text)
    assert not re.search(r"\btorch\.save\(|\.send\((?!answer\))\w+\)", text)  # a generator is sent an answer
    for call in re.findall(r"torch\.load\(.*", text):
        assert "weights_only=True" in call


def test_the_source_was_found() -> None:
    assert {"wire.py", "run_folder.py", "workers.py"} <= {p.name for p in SOURCES}


def test_whatever_safetensors_refuses_is_refused() -> None:
    """Twenty thousand damaged letters, read by both."""
    from random import Random

    import safetensors

    rng = Random(0)
    whole = wire.encode({"w": torch.ones(3, 2), "n": 5, "e": torch.empty(0, 3), "t": (torch.tensor(True), [None, "x"])})
    accepted = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            if rng.random() < 0.8:
                data[at] = rng.choice(b'0123456789[]{},:" "FIU') if rng.random() < 0.6 else rng.randrange(256)
            else:
                del data[at : at + rng.randint(1, 4)]
        try:
            wire.decode(bytes(data))
        except wire.Malformed:
            continue
        accepted += 1
        safetensors.deserialize(bytes(data))  # raises if it would have refused
    assert accepted
