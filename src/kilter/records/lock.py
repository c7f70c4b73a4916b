"""A file lock that one process holds. Where there is no fcntl (Windows), nothing stops two processes from using one file."""

from __future__ import annotations

from typing import IO


def hold(file: IO[str]) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
