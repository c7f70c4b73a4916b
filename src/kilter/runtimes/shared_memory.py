"""What processes of one machine hand each other: trees in the wire's terms, their tensors in shared memory if there is room.

The receiver reads tensors where they lie, without a copy: 25 models of 200 kB take 4 ms so, and 38 ms through a pipe.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from math import prod
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kilter import trees
from kilter.core import Tree
from kilter.fast import foreach
from kilter.fast.memory_layout import ALIGN
from kilter.records import wire

SIZE, COUNT = 96 << 20, 4  # of a worker's compartments; memory is only used once it is written to
GROUND = 1 / 3  # of a compartment, for what is made there and may prove not to be sent
LINUX = sys.platform == "linux"


class Shelf:
    """Shared memory in compartments, each for one parcel at a time, and free again when nobody holds the parcel's tensors."""

    def __init__(self, size: int = SIZE, count: int = COUNT) -> None:
        self._memory = mmap.mmap(-1, size * count)
        self._size = size
        self.free = list(range(count))

    def room(self, number: int | None) -> np.ndarray:
        """A compartment's bytes; none of None."""
        if number is None:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._memory, np.uint8, self._size, number * self._size)

    def take(self) -> int | None:
        """A free compartment: the last one freed, for its pages are at hand."""
        return self.free.pop() if self.free else None

    def read(self, parcel: bytes, number: int | None) -> Tree:
        """A parcel packed into this compartment, which is free again when its tensors are gone."""
        room = self.room(number)
        if number is not None:
            weakref.finalize(room, self.free.append, number).atexit = False
        return unpacked(parcel, room)


class Board:
    """A file in memory on which one process writes and others read, each into memory of its own. It grows as needed."""

    def __init__(self) -> None:
        self._file: BinaryIO = open(os.memfd_create("kilter"), "r+b") if LINUX else tempfile.TemporaryFile()  # noqa: SIM115
        self._room = np.empty(0, np.uint8)

    def _grown(self, size: int) -> np.ndarray:
        if len(self._room) < size:
            self._room = np.frombuffer(mmap.mmap(self._file.fileno(), size), np.uint8)
        return self._room

    def write(self, tree: Tree) -> bytes:
        """What to tell the readers."""
        size = space(tree)
        if size > len(self._room):
            self._file.truncate(size)
        return packed(tree, self._grown(size))

    def read(self, parcel: bytes) -> Tree:
        """What was written last."""
        return copied(unpacked(parcel, self._grown(os.fstat(self._file.fileno()).st_size)))


def space(tree: Tree) -> int:
    """How many bytes of room a tree's tensors take."""
    return sum(map(_aligned, trees.tensors(tree)))


def _aligned(array: Tensor) -> int:
    return -(-array.numel() * array.element_size() // ALIGN) * ALIGN


class Room:
    """A place for one parcel, part of which may be used before it is known what the parcel will be."""

    def __init__(self, bytes: np.ndarray) -> None:
        self.bytes = bytes
        self.end = 0

    def ground(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """An empty tensor that lies here, if there is still room."""
        size = prod(shape) * dtype.itemsize
        start, end = self.end, self.end + -(-size // ALIGN) * ALIGN
        if end > len(self.bytes) * GROUND:
            return None
        self.end = end
        # A storage of its own: others ask by it who lies in whose memory.
        return torch.from_numpy(self.bytes[start : start + size]).view(dtype).view(tuple(shape))

    def place(self, array: Tensor) -> int | None:
        """Where it lies, if it does."""
        start = array.data_ptr() - self.bytes.ctypes.data
        return start if 0 <= start < self.end and array.is_contiguous() else None


def packed(tree: Tree, room: np.ndarray | Room) -> bytes:
    """A parcel: its tensors in this room if they fit, else a letter of the wire."""
    room = room if isinstance(room, Room) else Room(room)
    arrays: dict[str, Tensor] = {}
    spec = wire.pack(tree, "", arrays)
    places: list[tuple[int, str, list[int]]] = []
    new: list[Tensor] = []
    end = room.end
    for array in arrays.values():
        found = room.place(array)
        places.append((end if found is None else found, wire.DTYPES[array.dtype], list(array.shape)))
        if found is None:
            new.append(array)
            end += _aligned(array)
    if not arrays or end > len(room.bytes):
        return b"\0" + wire.encode(tree)
    if new:
        foreach.copy_(_seats([p for p in places if p[0] >= room.end], room.bytes), [a.detach() for a in new])
    return b"\1" + json.dumps([spec, list(arrays), places], separators=(",", ":")).encode()


def unpacked(parcel: bytes, room: np.ndarray) -> Tree:
    """What was packed. Tensors in the room are read where they lie and keep the array `room` alive."""
    if not parcel[0]:
        return wire.decode(parcel[1:])
    spec, names, places = json.loads(parcel[1:])
    return wire.unpack(spec, dict(zip(names, _seats(places, room), strict=True)))


def _seats(places: Sequence[tuple[int, str, list[int]]], room: np.ndarray) -> list[Tensor]:
    """Tensors at these places of the room: where each begins, its dtype and its shape."""
    shared = torch.from_numpy(room)
    typed = {name: shared.view(dtype) for name, dtype in wire.TORCH.items() if any(name == p[1] for p in places)}
    found = []
    for start, name, shape in places:
        at = start // typed[name].itemsize
        found.append(typed[name][at : at + prod(shape)].view(shape))
    return found


def copied(tree: Tree) -> Tree:
    """The tree with tensors of its own."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: copied(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(v) for v in tree)
    return tree
