"""What came back, until it is combined: in memory while it is little, else in a temporary file.

An average then takes the memory of one model, however many clients were asked; and nobody need know.
"""

from __future__ import annotations

import tempfile
from functools import partial
from io import BufferedRandom

import numpy as np
import torch

from kilter.core import Post, Tree, Unread
from kilter.errors import Mistake
from kilter.runtimes.shared_memory import packed, space, unpacked

LIMIT = 64 << 20  # bytes of replies that stay in memory: a disk is slow for many small ones, memory dear for large ones


class Pile:
    """The replies of one step."""

    def __init__(self) -> None:
        self._held = 0  # bytes in memory
        self._file: BufferedRandom | None = None
        self._end = 0

    def put(self, reply: Tree, known: int | None = None) -> Tree | Unread:
        """The reply itself, or where it lies; `known`: about how many bytes it has. Letters to others stay: they are under way."""
        size = 0 if isinstance(reply, Post) else space(reply) if known is None else known
        if self._held + size <= LIMIT:
            self._held += size
            return reply
        size = space(reply)
        room = _room(size)
        parcel = packed(reply, room)
        try:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - gone with the last reply
            self._file.seek(self._end)
            self._file.write(room.data)
            self._file.flush()
        except OSError as e:
            raise Mistake(
                f"A round's replies do not fit into '{tempfile.gettempdir()}' ({e.strerror}): "
                "free some space there, or name another folder by TMPDIR, then resume."
            ) from None
        start, self._end = self._end, self._end + size
        return Unread(partial(_read, self._file, start, size, parcel))


def _read(file: BufferedRandom, start: int, size: int, parcel: bytes) -> Tree:
    room = _room(size)
    file.seek(start)
    if file.readinto(room.data) < size:
        raise OSError("a temporary file with replies was cut short")
    return unpacked(parcel, room)


def _room(size: int) -> np.ndarray:
    return torch.empty(
        size, dtype=torch.uint8
    ).numpy()  # torch's memory: kernels may round otherwise at another alignment
