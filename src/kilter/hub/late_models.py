"""Finished runs whose models did not reach every site. When such a site is back, the hub sends them.

The hub starts the run's process again. It finds the run finished, sends the models to the sites that lack them, and ends.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from kilter.hub.job_queue import JobQueue, QueuedJob
from kilter.hub.processes import ChildProcess

log = logging.getLogger("kilter.net")

MOST_RUNS = 1000  # newest finished runs that a hub remembers when it starts
MOST_TRIES = 10  # for each run and site, while the hub runs
PAUSE = 5.0  # seconds after the end of a run in which its sites leave it
SECONDS = "60"  # that a process waits for the sites

# Starts the process of a run, which waits so many seconds for its sites.
Start = Callable[[QueuedJob, str], Awaitable[ChildProcess]]


def sites_without_models(job: QueuedJob, folder: Path) -> list[str]:
    """The sites of a finished run that lack its models. Sites that aggregate in turn give them to each other."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        received, topology = list(summary.get("received", [])), str(summary.get("topology", ""))
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    return [] if topology.startswith("rotating") else [name for name in job.sites if name not in received]


class LateModels:
    """Which sites lack models of finished runs, and the processes that send them."""

    def __init__(self, queue: JobQueue, folder: Callable[[QueuedJob], Path], start: Start, parallel: int) -> None:
        self._queue, self._folder, self._start, self._parallel = queue, folder, start, parallel
        self.missing: dict[int, list[str]] = {}  # by job
        self.sending: dict[int, ChildProcess] = {}  # by job
        self._not_before: dict[int, float] = {}
        self._tries: Counter[tuple[int, str]] = Counter()
        for job in queue.finished_runs(MOST_RUNS):
            self.remember(job)

    def remember(self, job: QueuedJob) -> None:
        """Note which sites lack the models of a finished run."""
        self.missing.pop(job.id, None)
        if names := sites_without_models(job, self._folder(job)):
            self.missing[job.id] = names
            self._not_before[job.id] = time.monotonic() + PAUSE

    async def step(self, agents: Collection[str]) -> list[tuple[QueuedJob, ChildProcess]]:
        """Start the processes of runs for which sites have come back."""
        started = []
        for number, names in list(self.missing.items()):
            here = [n for n in names if n in agents and self._tries[number, n] < MOST_TRIES]
            ready = number not in self.sending and time.monotonic() >= self._not_before[number]
            job = self._queue.get(number) if here and ready and len(self.sending) < self._parallel else None
            if job is not None and not sites_without_models(job, self._folder(job)):  # its files are deleted
                del self.missing[number]
            elif job is not None:
                self._tries.update((number, name) for name in here)
                self.sending[number] = process = await self._start(job, SECONDS)
                started.append((job, process))
                log.info("job %d: sending its models to %s", number, ", ".join(here))
        return started

    def ended(self, job: QueuedJob) -> None:
        """The process that sent the models of a run has ended."""
        self.sending.pop(job.id, None)
        self.remember(job)

    def of(self, site: str) -> list[int]:
        """The runs whose models are being sent to a site."""
        return [number for number in self.sending if site in self.missing.get(number, ())]
