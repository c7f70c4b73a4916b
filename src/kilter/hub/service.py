"""The hub's port: agents, the streams of sites, and the calls of submitters and observers. Mutual TLS is always on.

What a caller may do depends on the role in its certificate. Sites connect agents and streams. Submitters submit, and see, cancel
and fetch what they submitted. Observers see and fetch everything. The hub's own certificate may do all but submit for others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Malformed, Mistake
from kilter.hub.hub import ConnectedAgent, Hub
from kilter.hub.job_queue import ACTIVE, Kind, QueuedJob, RunOptions
from kilter.hub.messages import (
    AGENT,
    CALL,
    FETCH,
    LOGS,
    AgentHello,
    AgentReport,
    Answer,
    Assignment,
    CancelRequest,
    FetchRequest,
    FilePart,
    JobRequest,
    ListRequest,
    LogRequest,
    Request,
    SubmitRequest,
    common_protocol,
    decode,
    decode_from_agent,
    decode_request,
    encode,
)
from kilter.hub.old_files import files_deleted
from kilter.hub.relay import check_hello, first_message, relay
from kilter.net.frames import ATTEND, CHUNK, JOB_KEY, to_frames
from kilter.net.names import printable
from kilter.net.ports import open_port
from kilter.net.revocation import RevocationList
from kilter.net.tls import WARNING_DAYS, Identity, caller, peer_certificate, role

log = logging.getLogger("kilter.net")

STATUS = "/kilter.Star/Status"
REVOCATION_SECONDS = 15.0  # between two looks at the revocation list
MOST_ACTIVE = 1000  # jobs of one submitter that are not over
LOG_SECONDS = 0.5  # between two looks at a log that is followed
SKIPPED = ("nodes", "checkpoint.safetensors", ".lock")  # files of a run folder that are of use only to resume it
Context = Any  # gRPC has no types


@dataclass(frozen=True)
class Caller:
    """Who calls, by certificate."""

    name: str
    role: str
    serial: int
    expires: datetime

    def sees(self, job: QueuedJob) -> bool:
        return self.role in ("observer", "server") or (self.role == "submitter" and job.owner == self.name)

    def may_cancel(self, job: QueuedJob) -> bool:
        return self.role == "server" or (self.role == "submitter" and job.owner == self.name)


class Refused(Exception):
    """The call was aborted."""


class HubService:
    """Answers calls on behalf of a hub."""

    def __init__(self, hub: Hub, identity: Identity, revoked: RevocationList | None) -> None:
        self.hub, self.identity, self.revoked = hub, identity, revoked
        self._checks = asyncio.Semaphore(2)  # submissions that are checked at the same time

    async def open(self, listen: str) -> tuple[aio.Server, int]:
        handlers = {
            AGENT: grpc.stream_stream_rpc_method_handler(self.agent),
            ATTEND: grpc.stream_stream_rpc_method_handler(self.attend),
            CALL: grpc.unary_unary_rpc_method_handler(self.call),
            LOGS: grpc.unary_stream_rpc_method_handler(self.logs),
            FETCH: grpc.unary_stream_rpc_method_handler(self.fetch),
            STATUS: grpc.unary_unary_rpc_method_handler(self.status),
        }
        return await open_port(handlers, listen, self.identity, 10_000)

    # Who calls ------------------------------------------------------------------------------------------------------

    async def _identify(self, context: Context, *roles: str) -> Caller:
        """The caller, if its certificate has one of these roles and is not revoked."""
        certificate = peer_certificate(context)
        if certificate is None:
            raise await self._refuse(context, "", "it has no certificate")
        known = Caller(caller(context), role(certificate), certificate.serial_number, certificate.not_valid_after_utc)
        if self.revoked is not None and self.revoked.has(known.serial):
            raise await self._refuse(context, known.name, "its certificate was revoked")
        if known.role not in roles:
            wanted = " or ".join(r for r in roles if r)
            stated = f"states the role {known.role}" if known.role else "states no role"
            why = f"its certificate {stated}, and this needs the role {wanted} (kilter certs sign --role ...)"
            raise await self._refuse(context, known.name, why)
        return known

    async def _identify_site(self, context: Context) -> Caller:
        known = await self._identify(context, "site", "")
        if known.name not in self.hub.config.sites:
            raise await self._refuse(context, known.name, "it is not on the hub's list of sites")
        return known

    async def _refuse(self, context: Context, name: str, why: str) -> Exception:
        log.warning("%s refused: %s", printable(name or context.peer()), printable(why))
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, printable(why))
        return Refused()

    async def _until_revoked(self, known: Caller) -> None:
        while self.revoked is None or not self.revoked.has(known.serial):
            await asyncio.sleep(REVOCATION_SECONDS)

    # Agents and sites -----------------------------------------------------------------------------------------------

    async def agent(self, _: object, context: Context) -> None:
        """An agent's stream."""
        first = await first_message(context)
        known = await self._identify_site(context)
        try:
            hello = decode(first, AgentHello)
            if hello.name != known.name:
                raise Malformed("its hello has another name than its certificate")
            protocol = common_protocol(hello.protocols)
        except Malformed as e:
            raise await self._refuse(context, known.name, str(e)) from None
        outbox: asyncio.Queue[Assignment] = asyncio.Queue()
        agent = ConnectedAgent(known.name, hello.parallel, outbox.put_nowait, expires=known.expires)
        tasks = [
            asyncio.create_task(self._listen(agent, context)),
            asyncio.create_task(self._write(outbox, protocol, context)),
            asyncio.create_task(self._until_revoked(known)),
            asyncio.create_task(agent.replaced.wait()),
        ]
        self.hub.arrived(agent)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[2].done():
                await self._refuse(context, known.name, "its certificate was revoked")
            if agent.replaced.is_set():
                why = "a newer agent of the same name took its place: does another one run with this certificate?"
                await context.abort(grpc.StatusCode.ABORTED, why)
        finally:
            for task in tasks:
                task.cancel()
            self.hub.left(agent)

    async def _listen(self, agent: ConnectedAgent, context: Context) -> None:
        while isinstance(data := await context.read(), bytes):
            try:
                message = decode_from_agent(data)
            except Malformed as e:
                log.warning("%s: %s", agent.name, e)
                return
            if isinstance(message, AgentReport):
                agent.reports.clear()
                agent.reports.update({report.job: report for report in message.runs})
                self.hub.changed.set()

    async def _write(self, outbox: asyncio.Queue[Assignment], protocol: int, context: Context) -> None:
        while True:
            assignment = await outbox.get()
            await context.write(encode(Assignment(assignment.run, assignment.hold, protocol)))

    async def attend(self, _: object, context: Context) -> None:
        """A site's stream: to the process of its run."""
        first = await first_message(context)
        known = await self._identify_site(context)
        metadata = dict(context.invocation_metadata() or ())
        number = str(metadata.get(JOB_KEY, ""))
        job = self.hub.queue.get(int(number)) if number.isdecimal() and len(number) < 16 else None
        if job is None or job.kind == "study" or known.name not in job.sites:
            raise await self._refuse(context, known.name, "this hub has no such run for it: use `kilter site run`")
        if job.state == "finished" and job.id not in self.hub.late.sending:
            for frame in to_frames({"kind": "goodbye", "finished": True, "why": ""}):
                await context.write(frame)
            return
        try:
            check_hello(first, known.name)
        except Malformed as e:
            raise await self._refuse(context, known.name, str(e)) from None
        if job.id not in self.hub.running and job.id not in self.hub.late.sending:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"job {job.id} does not run now")
        passing = asyncio.create_task(relay(first, context, self.hub.socket(job.id), self.hub.traffic))
        revoked = asyncio.create_task(self._until_revoked(known))
        try:
            await asyncio.wait([passing, revoked], return_when=asyncio.FIRST_COMPLETED)
            if revoked.done():
                raise await self._refuse(context, known.name, "its certificate was revoked")
            await passing
        finally:
            passing.cancel()
            revoked.cancel()

    # Submitters and observers ---------------------------------------------------------------------------------------

    async def call(self, data: bytes, context: Context) -> bytes:
        """Submit, list or cancel."""
        known = await self._identify(context, "submitter", "observer", "server")
        try:
            request = decode_request(data)
            return encode(await self._answer(known, request))
        except Mistake as e:
            return encode(Answer(refused=str(e)))
        except (OSError, sqlite3.Error) as e:
            log.error("a call of %s failed: %s", printable(known.name), e)
            return encode(Answer(refused="The hub cannot do this now: see its log."))

    async def _answer(self, known: Caller, request: Request) -> Answer:
        queue = self.hub.queue
        if isinstance(request, SubmitRequest):
            job = await self._submit(known, request)
            return self._jobs(queue.get(job))
        if isinstance(request, ListRequest):
            jobs = queue.newest(request.most, known.name if known.role == "submitter" else "")
            return self._jobs(*jobs)
        job_ = self._visible(known, request.job)
        if isinstance(request, CancelRequest):
            if not known.may_cancel(job_):
                raise Mistake("Observers cannot cancel jobs.")
            if not queue.cancel(job_.id, f"cancelled by {known.name}"):
                raise Mistake(f"Job {job_.id} is {job_.state} already.")
            self.hub.changed.set()
            return self._jobs(queue.get(job_.id))
        assert isinstance(request, JobRequest)
        return self._jobs(job_, *queue.runs_of(job_.id))

    def _jobs(self, *jobs: QueuedJob | None) -> Answer:
        return Answer([self.hub.view(job) for job in jobs if job is not None])

    def _visible(self, known: Caller, number: int) -> QueuedJob:
        job = self.hub.queue.get(number)
        if job is None or not known.sees(job):
            raise Mistake(f"There is no job {number} that {known.name} may see: `kilter jobs` lists them.")
        return job

    async def _submit(self, known: Caller, request: SubmitRequest) -> int:
        if known.role != "submitter":
            raise Mistake("Only a certificate with the role submitter may submit: kilter certs sign --role submitter.")
        sites = request.sites or list(self.hub.config.sites)
        for name in sites:
            if name not in self.hub.config.sites:
                raise Mistake(f"'{name}' is not a site of this hub. There are: {', '.join(self.hub.config.sites)}.")
        if len(set(sites)) < len(sites):
            raise Mistake("--sites names a site twice.")
        if request.quorum > len(sites):
            raise Mistake(f"The quorum is a number of sites from 1 to {len(sites)}, not {request.quorum}.")
        if self.hub.queue.active_of(known.name) >= MOST_ACTIVE:
            raise Mistake(f"You have {MOST_ACTIVE} jobs that are not over: wait for some, or cancel some.")
        async with self._checks:
            admitted = await check(request, self.hub.config.data)
        if admitted.get("refused"):
            raise Mistake(str(admitted["refused"]))
        kind: Kind = "study" if admitted["kind"] == "study" else "experiment"
        options = RunOptions(str(admitted["data"]), request.deadline, request.grace, request.preset)
        name = request.name or str(admitted["name"])
        rounds = int(str(admitted["rounds"]))
        job = self.hub.queue.add(kind, name, known.name, request.text, sites, request.quorum, options, rounds=rounds)
        log.info("%s submitted job %d (%s)", known.name, job, printable(name))
        self.hub.changed.set()
        return job

    async def logs(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        """The log of a job; with `follow`, until the job is over."""
        known = await self._identify(context, "submitter", "observer", "server")
        request, job = await self._requested(known, data, LogRequest, context)
        path, at = self.hub.log_file(job), 0
        while True:
            current = self.hub.queue.get(job.id)
            over = current is None or current.state not in ACTIVE
            while part := _read_from(path, at):
                at += len(part)
                yield part
            if over or not request.follow:
                return
            await asyncio.sleep(LOG_SECONDS)

    async def fetch(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        """The files of a run or study: each as `F` and its path and size, then `B` and its bytes."""
        known = await self._identify(context, "submitter", "observer", "server")
        _, job = await self._requested(known, data, FetchRequest, context)
        folder = self.hub.folder(job)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            relative = path.relative_to(folder)
            if set(relative.parts) & set(SKIPPED) or path.suffix == ".new":
                continue
            with suppress(FileNotFoundError), open(path, "rb") as file:
                size = path.stat().st_size
                yield b"F" + encode(FilePart(relative.as_posix(), size))
                while size and (part := file.read(min(CHUNK, size))):
                    size -= len(part)
                    yield b"B" + part

    async def _requested(
        self, known: Caller, data: bytes, kind: type[LogRequest | FetchRequest], context: Context
    ) -> tuple[Any, QueuedJob]:
        try:
            request = decode(data, kind)
            job = self._visible(known, request.job)
            if files_deleted(job, self.hub.home(job)):
                days = self.hub.config.keep
                raise Mistake(f"The files of job {job.id} are deleted: this hub keeps them for {days:g} days.")
            return request, job
        except Mistake as e:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(e))
            raise Refused from None

    async def status(self, _: bytes, context: Context) -> bytes:
        """`kilter status`: for everyone with a certificate, without what runs."""
        await self._identify(context, "submitter", "observer", "server", "site", "")
        left = self.identity.renewed().days_left()
        here = [name for name in self.hub.config.sites if name in self.hub.agents]
        plain = {
            "me": self.identity.name,
            "here": here,
            "away": [name for name in self.hub.config.sites if name not in here],
            "jobs": dict(self.hub.queue.counts()),
            "bytes_in": self.hub.traffic["in"],
            "bytes_out": self.hub.traffic["out"],
            "certificate_days": None if left is None else round(left, 1),
            "expiring": [
                f"{n} in {d:.0f} days" for n, a in self.hub.agents.items() if (d := a.days_left() or 999) < WARNING_DAYS
            ],
        }
        return json.dumps(plain).encode()


def _read_from(path: Path, at: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(at)
            return file.read(CHUNK)
    except OSError:
        return b""


async def check(request: SubmitRequest, data: object) -> dict[str, object]:
    """Check a submission in a process of its own, with limited time."""
    spec = {"text": request.text, "preset": request.preset, "data": request.data, "own_data": sorted(data)}  # type: ignore[call-overload]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kilter.hub.admission",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(json.dumps(spec).encode()), 120)
    except TimeoutError:
        process.kill()
        raise Mistake("Checking the submitted file took too long.") from None
    if process.returncode:
        log.error("a submission could not be checked: %s", error.decode(errors="replace")[-2000:])
        raise Mistake("The submitted file could not be checked: see the hub's log.")
    answer: dict[str, object] = json.loads(out)
    return answer
