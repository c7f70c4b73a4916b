"""Arrays in files that are mapped into memory, and may be larger than it.

What was read from such a file counts as memory of this process, until it is released. A thread does this for large arrays, in every
process that reads them: the operating system still has the pages, so reading them again is quick.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from kilter.data.files import AnyArray

WATCHED = 2**28  # bytes of an array, from which on a thread releases what was read
GROWTH = 2**28  # bytes that may be read between two releases
PAUSE = 0.05  # seconds between two looks
STATUS = Path("/proc/self/statm")  # of Linux: sizes in pages

_maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address of the array's first number
_watching = False


def open_mapped(path: Path) -> AnyArray:
    """The array of a .npy file. Nothing is read before it is used, and nobody writes to the file."""
    array = np.load(path, mmap_mode="c", allow_pickle=False)
    _maps[array.ctypes.data] = array._mmap
    if array.nbytes >= WATCHED:
        watch()
    return array


def release(x: Tensor) -> None:
    """Stop counting the parts of a mapped array that were read as memory of this process. Other arrays stay as they are."""
    mapped = _maps.get(x.data_ptr())
    if mapped is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def watch() -> None:
    """Start the thread that releases mapped arrays, here and in processes that are forked from this one."""
    global _watching
    if _watching or not STATUS.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    _watching = True
    os.register_at_fork(after_in_child=_start)
    _start()


def _start() -> None:
    # Counted here and not in the thread, which may begin after the first array has been read.
    threading.Thread(target=_release_often, args=(_shared_bytes(),), name="kilter-mapped", daemon=True).start()


def _release_often(least: int) -> None:
    """Release mapped arrays whenever this process holds GROWTH bytes more than it did at its least."""
    while True:
        time.sleep(PAUSE)
        if not _maps:
            continue
        least = min(least, held := _shared_bytes())
        if held - least > GROWTH:
            for mapped in list(_maps.values()):
                with suppress(ValueError):  # it was closed meanwhile
                    mapped.madvise(mmap.MADV_DONTNEED)
            least = _shared_bytes()


def _shared_bytes() -> int:
    """Bytes of files that are in the memory of this process."""
    return int(STATUS.read_text().split()[2]) * mmap.PAGESIZE
