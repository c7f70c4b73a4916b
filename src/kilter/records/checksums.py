"""Checksums of files, so that an altered or damaged file is refused instead of silently used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from kilter.errors import Mistake

FILE = "checksums.json"  # in the folder of a finished run


def checksum(data: bytes) -> str:
    """Tells contents apart: BLAKE2b, 128 bits."""
    return blake2b(data, digest_size=16).hexdigest()


def of_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Checksums of the files that exist."""
    return {name: checksum((folder / name).read_bytes()) for name in names if (folder / name).exists()}


def read(folder: Path) -> Mapping[str, str]:
    """The checksums of a finished run; empty for a run that is not finished, or older than checksums."""
    try:
        sums = json.loads((folder / FILE).read_text())
    except OSError:
        return {}
    except ValueError:
        sums = None
    if not isinstance(sums, dict):
        raise altered(folder / FILE)
    return sums


def verify(folder: Path, name: str, data: bytes) -> None:
    """Refuse a file of a finished run that is not as the run wrote it."""
    known = read(folder).get(name)
    if known is not None and known != checksum(data):
        raise altered(folder / name)


def altered(path: Path) -> Mistake:
    return Mistake(f"'{path}' was altered or damaged after it was written: restore it from a backup, or run again.")
