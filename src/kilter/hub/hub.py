"""The hub: it keeps the queue, starts the processes of runs and studies, and tells the agents which runs to take part in.

Everything runs in one event loop. What must survive is in the queue and in the run folders; the rest is rebuilt from what the
agents report. So killing the hub at any moment loses nothing: when it starts again, jobs that were running go on.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kilter.errors import Mistake
from kilter.hub.config import HubConfig
from kilter.hub.job_queue import JobQueue, QueuedJob
from kilter.hub.late_models import LateModels
from kilter.hub.messages import Assignment, JobView, SiteReport, State
from kilter.hub.old_files import delete, expired_folders
from kilter.hub.processes import MISTAKE, REFUSED, ChildProcess, last_message
from kilter.hub.schedule import AgentView, Decision, assignments, decide, present
from kilter.net.names import printable
from kilter.net.tls import ExpiryWatch
from kilter.records.files import write
from kilter.records.lock import hold

log = logging.getLogger("kilter.net")

TICK = 1.0  # seconds between two looks at the queue, if nothing happens
SWEEP_SECONDS = 3600.0  # between two looks for old files
MOST_CRASHES = 3  # of the process of a job without a new round in between, before the job fails


@dataclass
class RunningJob:
    """A job whose process runs."""

    job: QueuedJob
    process: ChildProcess
    lacking_since: float | None = None  # when it lost its quorum

    def lacked_for(self) -> float:
        return 0.0 if self.lacking_since is None else time.monotonic() - self.lacking_since


@dataclass
class ConnectedAgent:
    """An agent that holds a stream; `assign` tells it what to do."""

    name: str
    parallel: int
    assign: Callable[[Assignment], None]
    reports: dict[int, SiteReport] = field(default_factory=dict)
    expires: datetime | None = None  # its certificate
    assigned: Assignment | None = None
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # a newer agent of the same name connected

    def view(self) -> AgentView:
        return AgentView(self.parallel, self.reports)

    def days_left(self) -> float | None:
        """Days until its certificate expires."""
        return None if self.expires is None else (self.expires - datetime.now(UTC)).total_seconds() / 86400


class Hub:
    """The queue, the processes and the agents."""

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = open(config.state / ".lock", "w")  # noqa: SIM115 - held as long as the hub
        if not hold(self._lock):
            raise Mistake(f"Another hub works in '{config.state}': stop it, or choose another state folder.")
        self.queue = JobQueue(config.state / "queue.sqlite")
        self.running: dict[int, RunningJob] = {}
        self.agents: dict[str, ConnectedAgent] = {}
        self.traffic: Counter[str] = Counter()
        self.crashes = 0
        self.problem = ""  # why the hub cannot work now
        self.changed = asyncio.Event()
        self._sockets = Path(tempfile.mkdtemp(prefix="kilter-"))  # short, as the path of a socket must be; private
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: set[int] = set()
        self._expiry: defaultdict[str, ExpiryWatch] = defaultdict(ExpiryWatch)  # of the agents' certificates
        self._rounds: dict[int, int] = {}  # of jobs at their last crash
        self._next_sweep = 0.0
        self.late = LateModels(self.queue, self.folder, self._start_process, config.parallel)

    # Files ----------------------------------------------------------------------------------------------------------

    def folder(self, job: QueuedJob) -> Path:
        """The run folder of a job, or the study's folder."""
        if job.kind == "run":
            return self.config.state / "jobs" / str(job.parent) / "study" / "runs" / job.key
        return self.home(job) / ("study" if job.kind == "study" else "run")

    def home(self, job: QueuedJob) -> Path:
        """The folder with everything that belongs to a job but, of a study's run, the run folder."""
        return self.config.state / "jobs" / str(job.id)

    def log_file(self, job: QueuedJob) -> Path:
        return self.home(job) / "log.txt"

    def socket(self, job: int) -> str:
        return str(self._sockets / str(job))

    def view(self, job: QueuedJob) -> JobView:
        """A job for those who may see it."""
        done = total = job.rounds
        if job.kind == "study":
            runs = self.queue.states_of(job.id)
            done, total = runs.count("finished"), len(runs)
        elif job.state != "finished":
            done = _lines(self.folder(job) / "rounds.jsonl")
        names = ("name", "kind", "owner", "state", "reason", "quorum", "submitted", "started", "ended", "parent")
        values = {name: getattr(job, name) for name in names}
        values |= {name: printable(values[name], 400) for name in ("name", "reason")}  # they come from elsewhere
        return JobView(job=job.id, sites=list(job.sites), rounds=done, of_rounds=total, **values)

    # The loop -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after the queue until cancelled."""
        try:
            while True:
                self.changed.clear()
                try:
                    await self.step()
                    self.problem = ""
                except (OSError, sqlite3.Error, Mistake) as e:  # a full disk, for example: nothing is lost, try again
                    self.problem = f"the hub cannot work now: {e}"
                    log.error("%s", self.problem)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK):  # wait_for would swallow a cancellation that comes with a change
                        await self.changed.wait()
        finally:
            processes = [*(entry.process for entry in self.running.values()), *self.late.sending.values()]
            await asyncio.gather(*(process.stop() for process in processes), return_exceptions=True)
            for task in self._tasks:
                task.cancel()
            shutil.rmtree(self._sockets, ignore_errors=True)
            self.queue.close()

    async def step(self) -> None:
        """Compare the queue with what is there, and do what follows."""
        jobs = self.queue.active()
        active = {job.id for job in jobs}
        views = {name: agent.view() for name, agent in self.agents.items()}
        for name, agent in self.agents.items():
            self._expiry[name].look(name, agent.days_left())
        for number, entry in list(self.running.items()):
            if number not in active:  # it was cancelled
                self._stop(entry)
            elif len(present(entry.job, views)) >= entry.job.need:
                entry.lacking_since = None
            elif entry.lacking_since is None:
                entry.lacking_since = time.monotonic()
        lacked = {number: entry.lacked_for() for number, entry in self.running.items()}
        for decision in decide(jobs, lacked, views, self.config.parallel, self.config.patience):
            await self._carry_out(decision)
        for job, process in await self.late.step(self.agents):
            self._keep(self._watch_late(job, process))
        self._assign()
        self._delete_old_files()

    async def _carry_out(self, decision: Decision) -> None:
        job, reason = decision.job, decision.reason
        if decision.action == "start":
            await self._start(job)
        elif decision.action == "wait":
            self.queue.move(job.id, "waiting", reason)
        elif decision.action == "queue":
            self.queue.move(job.id, "queued")
        else:
            to: State = "failed" if decision.action == "fail" else "waiting"
            if self.queue.move(job.id, to, reason):
                log.warning("job %d %s: %s", job.id, "failed" if to == "failed" else "is suspended", reason)
            if job.id in self.running:
                self._stop(self.running[job.id])

    def _assign(self) -> None:
        """Tell every agent which runs to take part in, if that has changed."""
        jobs = self.queue.active()
        running = [number for number in self.running if number not in self._stopping]
        for agent in self.agents.values():
            run, hold = assignments(jobs, running, agent.name)
            assignment = Assignment([*run, *self.late.of(agent.name)], hold)
            if assignment != agent.assigned:
                agent.assigned = assignment
                agent.assign(assignment)

    def _delete_old_files(self) -> None:
        """Every hour, delete the files of jobs that ended more than `keep` days ago."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_SECONDS
        for folder in expired_folders(self.queue, self.config.state / "jobs", self.config.keep):
            self._keep(asyncio.to_thread(delete, folder))

    # Processes ------------------------------------------------------------------------------------------------------

    async def _start(self, job: QueuedJob) -> None:
        """Start the process of a job; the queue says `running` first, so a crash in between is repaired by starting it again."""
        if not self.queue.move(job.id, "running"):
            return
        process = await self._start_process(job)
        self.running[job.id] = RunningJob(job, process)
        self._keep(self._watch(job, process))
        log.info("job %d (%s) runs as process %d", job.id, job.name, process.pid)

    async def _start_process(self, job: QueuedJob, linger: str = "0") -> ChildProcess:
        home = self.home(job)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(home / "spec.toml", job.spec)
        words = self._study_words(job, home) if job.kind == "study" else self._run_words(job, home, linger)
        return await ChildProcess.start(words, self.log_file(job))

    def _run_words(self, job: QueuedJob, home: Path, linger: str) -> list[str]:
        options = job.options
        words = ["serve", str(home / "spec.toml"), "--listen", f"unix:{self.socket(job.id)}", "--insecure"]
        words += ["--sites", ",".join(job.sites), "--out", str(self.folder(job)), "--largest", str(self.config.largest)]
        words += ["--data", self.config.data.get(options.data, "none")]
        words += ["--deadline", str(options.deadline), "--grace", str(options.grace), "--linger", linger]
        return words + (["--quorum", str(job.quorum)] if job.quorum else [])

    def _study_words(self, job: QueuedJob, home: Path) -> list[str]:
        return ["hub", "study", str(self.queue.path), str(job.id), str(home / "spec.toml"), str(self.folder(job))]

    async def _watch(self, job: QueuedJob, process: ChildProcess) -> None:
        """When a process ends, its job is finished or failed, or starts again after a crash."""
        code = await process.wait()
        del self.running[job.id]
        self._stopping.discard(job.id)
        self.changed.set()
        if process.stopping:
            return
        if code == 0 and self._has_result(job):
            self.queue.move(job.id, "finished")
            self.late.remember(job)
            log.info("job %d is finished", job.id)
        elif code in (0, MISTAKE, REFUSED):
            self._fail(job, last_message(process.log) or "it ended without a result")
        else:
            self.crashes += 1
            rounds = _lines(self.folder(job) / "rounds.jsonl")
            crashes = self.queue.crashed(job.id, progressed=rounds > self._rounds.get(job.id, 0))
            self._rounds[job.id] = rounds
            log.warning("the process of job %d ended with code %d (%d)", job.id, code, crashes)
            if crashes >= MOST_CRASHES:
                self._fail(job, f"its process crashed {crashes} times: {last_message(process.log)}"[:400])

    async def _watch_late(self, job: QueuedJob, process: ChildProcess) -> None:
        """When the process that sent models of a finished run ends, look who has them now."""
        await process.wait()
        self.late.ended(job)
        self.changed.set()

    def _has_result(self, job: QueuedJob) -> bool:
        return (self.folder(job) / ("results.json" if job.kind == "study" else "summary.json")).exists()

    def _fail(self, job: QueuedJob, why: str) -> None:
        self.queue.move(job.id, "failed", why)
        log.warning("job %d failed: %s", job.id, why)

    def _stop(self, entry: RunningJob) -> None:
        if entry.job.id not in self._stopping:
            self._stopping.add(entry.job.id)
            self._keep(entry.process.stop())

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Agents ---------------------------------------------------------------------------------------------------------

    def arrived(self, agent: ConnectedAgent) -> None:
        """An agent connected; an older stream of the same name no longer counts."""
        if agent.name in self.agents:
            self.agents[agent.name].replaced.set()
        self.agents[agent.name] = agent
        log.info("the agent of %s is connected", agent.name)
        self.changed.set()

    def left(self, agent: ConnectedAgent) -> None:
        if self.agents.get(agent.name) is agent:
            del self.agents[agent.name]
            log.warning("the agent of %s left", agent.name)
            self.changed.set()


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0
