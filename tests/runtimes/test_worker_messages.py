"""What came of a step travels column by column and comes out node by node, as it went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.core import Post
from kilter.errors import Mistake
from kilter.records import wire
from kilter.runtimes.shared_memory import SharedSlots, pack_shared
from kilter.runtimes.step_runner import Done
from kilter.runtimes.worker_messages import (
    _together,
    decode_outcomes,
    encode_failure,
    encode_outcomes,
    encode_sendable,
    merge_columns,
    split_columns,
)
from small import same

SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
OUTLINES: st.SearchStrategy[Any] = st.recursive(
    st.tuples(st.just("t"), SHAPES) | st.just("v"),
    lambda inner: (
        st.dictionaries(st.text("ab/%", max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.tuples(st.just("u"), st.lists(inner, max_size=2))
    ),
    max_leaves=6,
)
PLAIN = [None, True, 3, 2.5, float("inf"), "a", b"x"]


def grown(outline: Any, seed: int) -> Any:
    """A tree of this outline."""
    if isinstance(outline, dict):
        return {k: grown(v, seed + i + 1) for i, (k, v) in enumerate(outline.items())}
    if isinstance(outline, list):
        return [grown(v, seed + i + 1) for i, v in enumerate(outline)]
    if outline == "v":
        return PLAIN[seed % len(PLAIN)]
    kind, of = outline
    if kind == "u":
        return tuple(grown(v, seed + i + 1) for i, v in enumerate(of))
    return torch.full(of, float(seed))


@given(outline=OUTLINES, count=st.integers(1, 4))
def test_replies_of_one_outline(outline: Any, count: int) -> None:
    done = {f"n{k}": (Done(grown(outline, k)), None) for k in range(count)}
    actual = {node: d.reply for node, d, _ in decode_outcomes(wire.decode(wire.encode(encode_outcomes(done))))}
    assert same(actual, {node: d.reply for node, (d, _) in done.items()})


@given(outlines=st.lists(OUTLINES, min_size=1, max_size=3))
def test_replies_of_any_outlines(outlines: list[Any]) -> None:
    done = {f"n{k}": (Done(grown(o, k)), None) for k, o in enumerate(outlines)}
    actual = {node: d.reply for node, d, _ in decode_outcomes(wire.decode(wire.encode(encode_outcomes(done))))}
    assert same(actual, {node: d.reply for node, (d, _) in done.items()})


def test_all_that_came_of_a_step() -> None:
    seen = wire.facts({"w": torch.ones(2)})
    done = {
        "a": (Done({"w": torch.ones(2)}, None, [(0.5, 3)], 1.5, ["a word"], seen), {"kept": torch.zeros(1)}),
        "b": (Done(Post({"a": 1})), None),
        "c": (Done(error=Mistake("Do otherwise.")), None),
        "d": (Done(error=ValueError("odd")), {}),
    }
    actual = {node: (d, state) for node, d, state in decode_outcomes(encode_outcomes(done))}
    a, b, c, d = (actual[k][0] for k in "abcd")
    assert (a.fits, a.seconds, a.notes, a.seen) == ([(0.5, 3)], 1.5, ["a word"], seen)
    assert same([actual[k][1] for k in "abcd"], [{"kept": torch.zeros(1)}, None, None, {}])
    assert isinstance(b.reply, Post)
    assert isinstance(c.error, Mistake)
    assert str(c.error) == "Do otherwise."
    assert isinstance(d.error, RuntimeError)
    assert "ValueError: odd" in str(d.error)


@given(outlines=st.lists(OUTLINES, min_size=1, max_size=3), alike=st.booleans())
def test_what_a_worker_saw_is_what_the_receiver_would_have_seen(outlines: list[Any], alike: bool) -> None:
    replies = [grown(outlines[0 if alike else k], k) for k in range(len(outlines))]
    looks = wire.facts_each(replies)
    assert looks == [wire.facts(r) for r in replies]
    done = {f"n{k}": (Done(r, seen=look), None) for k, (r, look) in enumerate(zip(replies, looks, strict=True))}
    assert [d.seen for _, d, _ in decode_outcomes(encode_outcomes(done))] == looks


def test_models_of_one_stack_are_not_copied_and_others_are_right() -> None:
    whole = torch.rand(3, 16)
    assert _together(list(whole.unbind())).data_ptr() == whole.data_ptr()
    assert _together([whole[1], whole[2]]).data_ptr() == whole[1].data_ptr()  # a part of a larger one
    for parts in ([whole[1], whole[0], whole[2]], [whole[0], whole[1]], [whole[0], whole[1], torch.rand(16)]):
        assert torch.equal(_together(parts), torch.stack(parts))
    for other in (torch.rand(4, 3, 16)[1], torch.rand(3, 16, 2)[:, :, 0], torch.rand(3, 1).expand(3, 16)):
        assert torch.equal(_together(list(other.unbind())), other)


def test_tensors_begin_where_torch_would_have_put_them() -> None:
    """Kernels may round otherwise at another alignment."""
    replies = [{"w": torch.rand(64), "b": torch.rand(10)} for _ in range(5)]
    slots = SharedSlots(size=10_000, count=1)
    number = slots.take()
    column = slots.read(pack_shared(merge_columns(replies), slots.slot(number)), number)
    assert all(v.data_ptr() % 64 == 0 for r in split_columns(column) for v in r.values())
    assert same(split_columns(column), replies)


def test_apologies_are_for_those_that_need_them() -> None:
    done: dict[str, Any] = {"a": (Done(5), None), "b": (Done({1: 2}), None), "c": (Done(6), {"open": object()})}
    with pytest.raises(TypeError):
        wire.encode(encode_outcomes(done))
    actual = {node: d for node, d, _ in decode_outcomes(wire.decode(wire.encode(encode_sendable(done))))}
    assert actual["a"].reply == 5
    for node in "bc":
        assert "cannot be sent" in str(actual[node].error)
    assert all("late" in str(d.error) for _, d, _ in decode_outcomes(encode_failure(["a", "b"], ValueError("late"))))
