"""The agent of a site: one connection to the hub, and a process for each run that the site takes part in.

A process is `kilter join` with this site's data, policy and a state directory of its own, so the policy, approvals and audit apply
to every run. The agent compares what the hub wants with what runs, starts and stops processes, and reports how each run is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc import aio

from kilter.errors import Malformed, Mistake
from kilter.hub.config import SiteConfig
from kilter.hub.messages import AGENT, AgentHello, AgentReport, Assignment, SiteReport, decode, encode
from kilter.hub.messages import SiteState as RunState
from kilter.hub.processes import NOT_APPROVED, REFUSED, ChildProcess, last_message
from kilter.net.frames import OPTIONS
from kilter.net.names import printable
from kilter.net.tls import Identity
from kilter.records.lock import hold

log = logging.getLogger("kilter.net")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds before dialling again; doubled each time, with 50 % jitter
FIRST_RETRY, LONGEST_RETRY = 2.0, 60.0  # seconds before a failing process is started again
TICK = 0.5
DIGEST = re.compile(r"\b[0-9a-f]{32}\b")


@dataclass
class SiteRun:
    """A run at this site."""

    job: int
    state: RunState = "starting"
    why: str = ""
    process: ChildProcess | None = None
    digest: str = ""  # of terms that wait for an approval
    retry_at: float = 0.0
    retries: int = 0

    def report(self) -> SiteReport:
        return SiteReport(self.job, self.state, self.why[:400])


class Agent:
    """Keeps the processes of a site's runs in step with what the hub wants."""

    def __init__(self, config: SiteConfig) -> None:
        self.config = config
        self.identity = Identity.read(config.tls)
        config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = open(config.state / ".agent-lock", "w")  # noqa: SIM115 - held as long as the agent
        if not hold(self._lock):
            raise Mistake(f"Another agent works in '{config.state}': stop it, or choose another state folder.")
        self.runs: dict[int, SiteRun] = {}
        self.assignment = Assignment([], [])
        self.connected = False
        self.changed = asyncio.Event()
        self.on_report: Callable[[], None] = lambda: None  # tells the hub how the runs are
        self._tasks: set[asyncio.Task[None]] = set()

    def folder(self, job: int) -> Path:
        """The state directory of a run."""
        return self.config.state / "runs" / str(job)

    def words(self, job: int) -> list[str]:
        """The command of a run's process."""
        config = self.config
        words = ["join", "--server", config.hub, "--server-name", config.hub_name, "--tls", str(config.tls)]
        words += ["--data", config.data, "--device", config.device, "--job", str(job)]
        words += ["--state-dir", str(self.folder(job)), "--approvals", str(config.state)]
        words += ["--policy", str(config.policy)] if config.policy else []
        words += ["--weights", config.weights] if config.weights else []
        for name, value in config.table.items():
            words += [f"--{name.replace('_', '-')}", value]
        return words

    # Runs -----------------------------------------------------------------------------------------------------------

    async def look_after_runs(self) -> None:
        """Start, stop and restart processes until cancelled."""
        try:
            while True:
                self.changed.clear()
                await self.step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK):  # wait_for would swallow a cancellation that comes with a change
                        await self.changed.wait()
        finally:
            running = [run.process for run in self.runs.values() if run.process]
            await asyncio.gather(*(process.stop() for process in running), return_exceptions=True)

    async def step(self) -> None:
        """Compare the hub's wishes with what runs here."""
        before = [run.report() for run in self.runs.values()]
        wanted, held = self.assignment.run, self.assignment.hold
        for number in [n for n in self.runs if n not in wanted and n not in held]:
            if self._stop(self.runs[number]):
                del self.runs[number]
        for number in held:
            if number in self.runs:
                self._stop(self.runs[number])
                self._unblock(self.runs[number])
        for number in sorted(wanted):
            run = self.runs.setdefault(number, SiteRun(number))
            self._unblock(run)
            ready = run.process is None and run.state in ("starting", "running")
            if ready and sum(each.process is not None for each in self.runs.values()) < self.config.parallel:
                await self._start(run)
        if [run.report() for run in self.runs.values()] != before:
            self.on_report()

    def _stop(self, run: SiteRun) -> bool:
        """Ask a run's process to end; whether there is none any more."""
        if run.process is None:
            return True
        if not run.process.stopping:
            self._keep(run.process.stop())
        return False

    def _unblock(self, run: SiteRun) -> None:
        """A run may go on when its terms were approved, or when it is time to try again."""
        approved = run.state == "pending" and self._approved(run.digest)
        again = run.state == "failing" and time.monotonic() >= run.retry_at
        if approved or again:
            run.state, run.why = "starting", ""

    def _approved(self, digest: str) -> bool:
        path = self.config.state / "approvals.jsonl"
        return path.exists() and f'"{digest}"' in path.read_text(errors="replace")

    async def _start(self, run: SiteRun) -> None:
        run.process = await ChildProcess.start(self.words(run.job), self.folder(run.job) / "log.txt")
        run.state, run.why = "running", ""
        self._keep(self._watch(run, run.process))
        log.info("run %d: process %d", run.job, run.process.pid)

    async def _watch(self, run: SiteRun, process: ChildProcess) -> None:
        """What the end of a process means for its run."""
        began = time.monotonic()
        code = await process.wait()
        run.process = None
        self.changed.set()
        if process.stopping:
            return
        why = last_message(process.log)
        if code == 0:
            run.state = "finished"
        elif code == REFUSED:
            run.state, run.why = "refused", why
        elif code == NOT_APPROVED:
            run.state, run.digest = "pending", (DIGEST.findall(why) or [""])[0]
            run.why = f"its terms {run.digest} wait for an approval at the site"
        else:
            run.retries = 0 if time.monotonic() - began > LONGEST_RETRY else run.retries + 1
            run.retry_at = time.monotonic() + min(FIRST_RETRY * 2**run.retries, LONGEST_RETRY)
            run.state, run.why = "failing", why or f"its process ended with code {code}"
        log.info("run %d is %s%s", run.job, run.state, f": {run.why}" if run.why else "")
        self.on_report()

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The hub --------------------------------------------------------------------------------------------------------

    async def stay_connected(self) -> None:
        """Hold a stream to the hub, and dial again whenever it is lost."""
        pause = FIRST_PAUSE
        while True:
            self.identity = self.identity.renewed()
            began = time.monotonic()
            try:
                await self._session()
                log.warning("the connection to the hub was lost")
            except aio.AioRpcError as e:
                why = printable((e.details() or e.code().name).splitlines()[0], 200)
                level = logging.ERROR if e.code() == grpc.StatusCode.PERMISSION_DENIED else logging.WARNING
                log.log(level, "not connected to the hub %s: %s", self.config.hub, why)
            except Malformed as e:
                log.warning("the hub sent something that cannot be used: %s", e)
            self.connected = False
            pause = FIRST_PAUSE if time.monotonic() - began > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _session(self) -> None:
        options = [*OPTIONS, ("grpc.ssl_target_name_override", self.config.hub_name)]
        async with aio.secure_channel(self.config.hub, self.identity.for_client(), options=options) as channel:
            stream = channel.stream_stream(AGENT)()
            await stream.write(encode(AgentHello(self.identity.name, self.config.parallel)))
            outbox = asyncio.Event()
            outbox.set()  # the hub hears at once how the runs are
            self.on_report = outbox.set
            writer = asyncio.create_task(self._report(stream, outbox))
            try:
                while isinstance(data := await stream.read(), bytes):
                    if not self.connected:
                        log.info("connected to the hub %s as %s", self.config.hub, self.identity.name)
                    self.connected = True
                    self.assignment = decode(data, Assignment)
                    self.changed.set()
                await stream.code()
            finally:
                writer.cancel()
                self.on_report = lambda: None

    async def _report(self, stream: aio.StreamStreamCall, outbox: asyncio.Event) -> None:
        while True:
            await outbox.wait()
            outbox.clear()
            await stream.write(encode(AgentReport([run.report() for run in self.runs.values()])))
