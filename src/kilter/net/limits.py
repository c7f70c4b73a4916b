"""Limits on what a run may use of a site: memory and child processes of its process, seconds of a step."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
from types import TracebackType

from kilter.net.policy import PolicyViolation


class StepTimeout(PolicyViolation):
    """A step took longer than the policy allows."""

    def __init__(self) -> None:
        super().__init__("The step took longer than this site's policy allows (seconds_per_step).")


def limit_memory(megabytes: int) -> None:
    """From now on, allocations beyond this fail as errors of the step that asked for them. 0: no limit."""
    if megabytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system"})


def limit_processes(most: int) -> None:
    """From now on, starting more processes than this fails. It cannot be undone, not even by a file that the site trusts."""
    left = most

    def watch(event: str, _: tuple[object, ...]) -> None:
        nonlocal left
        if event in STARTS:
            left -= 1
            if left < 0:
                raise PolicyViolation(f"This site's policy allows {most} child processes, and the run started more.")

    sys.addaudithook(watch)


class StepTimer:
    """Raises StepTimeout in the thread that entered it when the time is over: between two operations, never inside one."""

    def __init__(self, seconds: float) -> None:
        self._thread = threading.get_ident()
        self._timer = threading.Timer(seconds, self._interrupt) if seconds else None
        self._over = False
        self._lock = threading.Lock()

    def _interrupt(self) -> None:
        with self._lock:
            if not self._over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(StepTimeout))

    def __enter__(self) -> None:
        if self._timer:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
        if self._timer:
            self._timer.cancel()
