"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from kilter.errors import Mistake


def write(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all: to a new file, synced, then renamed."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(new, path)
    except OSError as e:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise cannot_write(path, e) from None


def cannot_write(path: Path, e: OSError) -> Mistake:
    """What to raise when a file cannot be written."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return Mistake(
            f"The disk is full: '{path}' could not be written. Free some space and try again; nothing is lost."
        )
    return Mistake(f"'{path}' could not be written: {e.strerror}.")
