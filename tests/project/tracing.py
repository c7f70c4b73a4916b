"""Record which files of Kilter call which, while something runs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import kilter

ROOT = str(Path(kilter.__file__).parent) + "/"
Calls = dict[str, set[str]]  # file -> the files it called


def _file(frame: FrameType | None) -> str:
    """The file of Kilter this frame is in, or that it was called from through other libraries; "" outside."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(ROOT):
            return path.removeprefix(ROOT)
        frame = frame.f_back
    return ""


@contextmanager
def recorded() -> Iterator[Calls]:
    """Inside this block, calls between Kilter's files are recorded, in all threads started meanwhile."""
    calls: Calls = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(ROOT) or frame.f_code.co_name in ("<module>", "<lambda>"):
            return
        file, caller = path.removeprefix(ROOT), _file(frame.f_back)
        calls.setdefault(file, set())
        if caller and caller != file:
            calls.setdefault(caller, set()).add(file)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def write(calls: Calls, path: Path) -> None:
    path.write_text(json.dumps({file: sorted(called) for file, called in calls.items()}))


def read(path: Path) -> Calls:
    return {file: set(called) for file, called in json.loads(path.read_text()).items()}
