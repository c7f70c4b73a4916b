"""What processes of one machine hand each other: the same tree, its tensors read where they lie, the memory used again."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kilter.runtimes.parcels import Shelf, copied, packed, unpacked
from kilter.wire import DTYPES
from small import same

TREE = {
    "floats": torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "kinds": [torch.ones(3).to(dtype) for dtype in DTYPES],
    "plain": (1, 2.5, "a", None, True, b"x"),
}


NO_ROOM = np.empty(0, np.uint8)


@pytest.mark.parametrize("size", [0, 100, 10_000], ids=["no room", "too little", "room"])
def test_the_same_tree_comes_out(size: int) -> None:
    room = np.zeros(size, np.uint8)
    assert same(unpacked(packed(TREE, room), room), TREE)


def test_tensors_are_read_where_they_lie() -> None:
    room = np.zeros(1000, np.uint8)
    (found,) = unpacked(packed([torch.ones(100)], room), room)
    found[0] = 5
    assert room[:4].view(np.float32)[0] == 5


def test_a_compartment_is_free_again_when_nobody_holds_its_tensors() -> None:
    shelf = Shelf(size=10_000, count=1)
    number = shelf.take()
    assert number == 0
    assert shelf.take() is None
    found = shelf.read(packed(TREE, shelf.room(0)), 0)
    part = found["floats"]
    kept = copied(found)
    del found
    gc.collect()
    assert shelf.take() is None  # a part of it is still held
    del part
    gc.collect()
    assert shelf.take() == 0
    shelf.room(0)[:] = 0
    assert same(kept, TREE)


def test_without_a_compartment_a_parcel_carries_all() -> None:
    assert same(Shelf(size=10, count=1).read(packed(TREE, NO_ROOM), None), TREE)


def test_what_the_wire_cannot_carry_neither_can_a_parcel() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        packed(torch.ones(2, dtype=torch.complex64), np.zeros(1000, np.uint8))
