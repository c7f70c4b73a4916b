"""Arrays in files that are mapped into memory, and may be larger than it."""

from __future__ import annotations

import mmap
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from kilter.data.files import AnyArray

_maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address of the array's first number


def open_mapped(path: Path) -> AnyArray:
    """The array of a .npy file. Nothing is read before it is used, and nobody writes to the file."""
    array = np.load(path, mmap_mode="c", allow_pickle=False)
    _maps[array.ctypes.data] = array._mmap
    return array


def release(x: Tensor) -> None:
    """Stop counting the parts of a mapped array that were read as memory of this process. Other arrays stay as they are."""
    mapped = _maps.get(x.data_ptr())
    if mapped is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)
