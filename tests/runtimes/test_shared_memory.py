"""What processes of one machine hand each other: the same tree, its tensors read where they lie, the memory used again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from kilter.core import Fit
from kilter.fast.fits import run
from kilter.fast.memory_layout import allocate_stacks_with
from kilter.records.wire import DTYPES
from kilter.runtimes.shared_memory import SharedSlots, SlotWriter, copy_tensors, pack_shared, unpack_shared
from kilter.train import SGD
from small import digits, mlp_task, same

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
    assert same(unpack_shared(pack_shared(TREE, room), room), TREE)


def test_tensors_are_read_where_they_lie() -> None:
    room = np.zeros(1000, np.uint8)
    (actual,) = unpack_shared(pack_shared([torch.ones(100)], room), room)
    actual[0] = 5
    assert room[:4].view(np.float32)[0] == 5


def test_a_compartment_is_free_again_when_nobody_holds_its_tensors() -> None:
    slots = SharedSlots(size=10_000, count=1)
    number = slots.take()
    assert number == 0
    assert slots.take() is None
    actual = slots.read(pack_shared(TREE, slots.slot(0)), 0)
    part = actual["floats"]
    kept = copy_tensors(actual)
    del actual
    gc.collect()
    assert slots.take() is None  # a part of it is still held
    del part
    gc.collect()
    assert slots.take() == 0
    slots.slot(0)[:] = 0
    assert same(kept, TREE)


def test_without_a_compartment_a_parcel_carries_all() -> None:
    assert same(SharedSlots(size=10, count=1).read(pack_shared(TREE, NO_ROOM), None), TREE)


def test_what_the_wire_cannot_carry_neither_can_a_parcel() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        pack_shared(torch.ones(2, dtype=torch.complex64), np.zeros(1000, np.uint8))


def test_what_is_made_on_the_ground_of_a_room_is_not_copied() -> None:
    bytes = np.zeros(30_000, np.uint8)
    room = SlotWriter(bytes)
    made, other = room.empty_tensor((2, 30), torch.float32), room.empty_tensor((5,), torch.float64)
    assert made is not None
    assert other is not None
    tree = {"made": made.fill_(1), "other": other.fill_(2), "part": made[1], "turned": made.t(), "new": torch.ones(40)}
    actual = unpack_shared(pack_shared(tree, room), bytes)
    assert same(actual, tree)
    assert same(unpack_shared(pack_shared(made, room), bytes), made)
    made[1] = 7
    other[0] = 3
    assert same(
        [actual["made"], actual["other"], actual["part"]], [made, other, made[1]]
    )  # they lie where they were made
    assert same(actual["turned"], torch.ones(30, 2))  # a copy, for it did not lie in order


def test_ground_is_a_part_of_a_room_and_copies_find_place_behind_it() -> None:
    bytes = np.zeros(30_000, np.uint8)
    room = SlotWriter(bytes)
    made = [room.empty_tensor((1000,), torch.float32) for _ in range(4)]
    assert [m is None for m in made] == [False, False, True, True]
    assert room.empty_tensor((0, 3), torch.float32) is not None
    assert same(unpack_shared(pack_shared(torch.ones(4000), room), bytes), torch.ones(4000))
    assert pack_shared(torch.ones(6000), room)[:1] == b"\0"  # what does not fit is a letter
    assert SlotWriter(NO_ROOM).empty_tensor((1,), torch.float32) is None


def test_what_is_trained_together_is_trained_where_it_is_sent_from() -> None:
    task = mlp_task()

    def loss(p: Any, batch: Any, _: Any) -> torch.Tensor:
        return task.loss(p, batch)

    rows = [digits().take(torch.arange(50 * k, 50 * k + 50)) for k in range(3)]
    fits = [Fit(loss, task.init(0), own, SGD(batch=16), k) for k, own in enumerate(rows)]
    room = SlotWriter(np.zeros(1 << 20, np.uint8))
    with allocate_stacks_with(room.empty_tensor):
        actual = run(fits)
    held = [room.place(v) is not None for f in actual for v in f.params.values() if v.nbytes % 64 == 0]
    assert held
    assert all(held)
    assert same([f.params for f in actual], [f.params for f in run(fits)])
    used = room.end
    run(fits)
    assert room.end == used  # nobody lays anything there any more
