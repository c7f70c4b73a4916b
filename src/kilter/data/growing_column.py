"""One column of a file that is read block by block."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Numbers = NDArray[np.float64] | NDArray[np.int64]
GROWTH = 1.2


class GrowingColumn:
    """Collects the cells of blocks. Numbers are copied into one array, so that the memory of a block is free again.

    Whole numbers stay whole numbers as long as there are no others and no gaps. A gap among numbers is NaN.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows  # as many as are expected
        self._type = pa.null()  # of the file's cells; null: only gaps so far
        self._numbers: Numbers | None = None
        self._chunks: list[pa.Array] = []
        self._count = 0

    def add(self, type_: pa.DataType, cells: pa.ChunkedArray) -> bool:
        """Append the cells of a block. `type_` is what pyarrow took them for. False: they differ from those of earlier blocks."""
        if pa.types.is_null(type_):
            self._add_gaps(len(cells))
        elif pa.types.is_integer(type_) or pa.types.is_floating(type_):
            if self._chunks:
                return False
            self._add_numbers(cells)
            self._type = type_
        elif self._numbers is not None or self._type not in (pa.null(), type_):
            return False
        else:
            if not self._chunks and self._count:
                self._chunks.append(pa.nulls(self._count, cells.type))
            self._chunks += cells.chunks
            self._type = type_
        self._count += len(cells)
        return True

    def _add_gaps(self, count: int) -> None:
        if self._numbers is not None:
            self._write(np.full(count, np.nan))
        elif self._chunks:
            self._chunks.append(pa.nulls(count, self._chunks[0].type))

    def _add_numbers(self, cells: pa.ChunkedArray) -> None:
        if self._numbers is None:
            whole = pa.types.is_integer(cells.type) and not self._count
            room = max(self._rows, self._count)
            fresh: Numbers = np.empty(room, dtype=np.int64) if whole else np.empty(room)
            fresh[: self._count] = 0 if whole else np.nan
            self._numbers = fresh
        at = self._count
        for chunk in cells.chunks:
            exact = pa.types.is_int64(chunk.type) and chunk.null_count == 0
            self._write(np.asarray((chunk if exact else chunk.cast(pa.float64(), safe=False)).to_numpy(False)), at)
            at += len(chunk)

    def _write(self, numbers: Numbers, at: int | None = None) -> None:
        """Write numbers at this place, by default the end."""
        assert self._numbers is not None
        start = self._count if at is None else at
        if numbers.dtype == np.float64 and self._numbers.dtype == np.int64:
            wider = np.empty(len(self._numbers))
            wider[:start] = self._numbers[:start]
            self._numbers = wider
        end = start + len(numbers)
        if end > len(self._numbers):
            self._numbers.resize(max(end, int(len(self._numbers) * GROWTH)), refcheck=False)
        self._numbers[start:end] = numbers

    def finish(self) -> pa.ChunkedArray:
        """The whole column. Numbers are one chunk without nulls, which pyarrow and numpy share."""
        if self._numbers is not None:
            self._numbers.resize(self._count, refcheck=False)
            return pa.chunked_array([pa.array(self._numbers)])
        if self._chunks:
            return pa.chunked_array(self._chunks)
        return pa.chunked_array([pa.nulls(self._count)])
