"""Replies until they are combined: in memory while they are small, otherwise in a temporary file.

An average then needs the memory of one model, however many clients reply. Methods do not notice.
"""

from __future__ import annotations

import tempfile
from functools import partial
from io import BufferedRandom

import numpy as np
import torch

from kilter.core import Post, Tree, Unread
from kilter.errors import Mistake
from kilter.runtimes.shared_memory import pack_shared, tensor_bytes, unpack_shared

LIMIT = 64 << 20  # bytes of replies that stay in memory


class ReplySpool:
    """The replies of one step."""

    def __init__(self) -> None:
        self._held = 0  # bytes in memory
        self._file: BufferedRandom | None = None
        self._end = 0

    def put(self, reply: Tree, known: int | None = None) -> Tree | Unread:
        """The reply itself, or a reference to it on disk. `known` is its approximate size. Letters stay in memory."""
        size = 0 if isinstance(reply, Post) else tensor_bytes(reply) if known is None else known
        if self._held + size <= LIMIT:
            self._held += size
            return reply
        size = tensor_bytes(reply)
        buffer = _buffer(size)
        packet = pack_shared(reply, buffer)
        try:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - deleted with the last reply
            self._file.seek(self._end)
            self._file.write(buffer.data)
            self._file.flush()
        except OSError as e:
            raise Mistake(
                f"A round's replies do not fit into '{tempfile.gettempdir()}' ({e.strerror}): "
                "free some space there, or set TMPDIR to another folder, then resume."
            ) from None
        start, self._end = self._end, self._end + size
        return Unread(partial(_read, self._file, start, size, packet))


def _read(file: BufferedRandom, start: int, size: int, packet: bytes) -> Tree:
    buffer = _buffer(size)
    file.seek(start)
    if file.readinto(buffer.data) < size:
        raise OSError("the temporary file with replies was truncated")
    return unpack_shared(packet, buffer)


def _buffer(size: int) -> np.ndarray:
    return torch.empty(
        size, dtype=torch.uint8
    ).numpy()  # aligned as torch aligns tensors, because alignment can change rounding
