"""Processes that end with their parent, and whose output goes to a log file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

REFUSED, NOT_APPROVED, MISTAKE = 10, 11, 2  # exit codes of a site's process
STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
LARGEST_LOG = 10_000_000  # bytes; a longer log is moved aside when the process starts again


class ChildProcess:
    """`kilter WORDS` in a process of its own. Its standard input is a pipe that ends when we do; then the child ends, too."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log
        self.stopping = False

    @staticmethod
    async def start(words: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> ChildProcess:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LARGEST_LOG:
            os.replace(log, log.with_name(log.name + ".old"))
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kilter.hub.child",
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(extra or {})},
                start_new_session=True,  # Ctrl-C at the parent's terminal is the parent's business
            )
        return ChildProcess(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self.stopping = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def last_message(log: Path) -> str:
    """The reason at the end of a log: the last line that `kilter:` begins, or the last line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    marked = [line.removeprefix("kilter: ") for line in lines if line.startswith("kilter: ")]
    return ([*lines, *marked][-1] if lines else "")[:400]
