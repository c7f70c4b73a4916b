"""The server's end of the sites' streams: a gRPC server in a thread of its own.

Every site holds one stream. Its name is the one in its certificate. A second stream of the same name replaces the first if it comes
from the same state directory, and is refused otherwise. What the messages mean is `kilter.net.server`'s business.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.fast.memory_layout import keep_memory
from kilter.net.byte_budget import ByteBudget
from kilter.net.frames import ATTEND as ATTEND
from kilter.net.frames import JOB_KEY as JOB_KEY
from kilter.net.frames import LARGEST, Ended, Head, read_large_letter, read_letter, to_frames
from kilter.net.messages import Goodbye, Hello, Refusal
from kilter.net.names import printable
from kilter.net.ports import LoopThread, open_port
from kilter.net.revocation import RevocationList
from kilter.net.tls import Identity, caller, peer_certificate, role
from kilter.net.transport import ConnectedSite, Transport
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

STATUS = "/kilter.Star/Status"
HELLO_SECONDS = 20.0  # within which a new stream must say hello
Context = Any  # gRPC has no types


REVOCATION_SECONDS = 15.0  # between two looks at the revocation list


@dataclass(eq=False)
class Stream(ConnectedSite):
    """One site's stream."""

    outbox: asyncio.Queue[tuple[Head, bytes]] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # we end it; `why` says why
    code: grpc.StatusCode = grpc.StatusCode.ABORTED
    why: str = ""
    said_goodbye: bool = False
    serial: int | None = None  # of its certificate
    forwarded: ByteBudget = field(default_factory=ByteBudget)  # what waits to be forwarded, by sender

    def end(self, code: grpc.StatusCode, why: str) -> None:
        self.code, self.why = code, why
        self.ended.set()


class GrpcServer(Transport):
    """Accepts sites, and passes messages in and out."""

    def __init__(
        self,
        listen: str,
        identity: Identity | None,
        allowed: Collection[str] | None,
        largest: int = LARGEST,
        revoked: RevocationList | None = None,
    ) -> None:
        keep_memory(large=True, most=64 << 20)
        super().__init__()
        self.allowed, self.largest, self.insecure = allowed, largest, identity is None
        self.identity, self.revoked = identity, revoked
        self.sites: dict[str, Stream] = {}  # type: ignore[assignment]
        self._thread = LoopThread("kilter-server")
        handlers = {
            ATTEND: grpc.stream_stream_rpc_method_handler(self.attend),
            STATUS: grpc.unary_unary_rpc_method_handler(self.report),
        }
        try:
            self._server, self.port = self._thread.run(open_port(handlers, listen, identity, 10_000))
        except Mistake:
            self._thread.stop()
            raise

    # In the loop's thread --------------------------------------------------------------------------------------------

    async def attend(self, _: object, context: Context) -> None:
        """A site's stream, from hello to goodbye."""
        stream = await self._welcome(context)
        if stream is None:
            return
        tasks = [asyncio.create_task(t) for t in (self._listen(stream, context), self._write(stream, context))]
        ended = asyncio.create_task(stream.ended.wait())
        watching = asyncio.create_task(self._watch_revocations(stream))
        why = "the connection was lost"
        try:
            await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                why = stream.why
                await context.abort(stream.code, stream.why)
            if tasks[0].done() and tasks[0].exception() is None:
                refused = tasks[0].result()
                why = f"refused: {refused}" if refused else "it closed its stream"
                if refused:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused)
        finally:
            for task in (*tasks, ended, watching):
                task.cancel()
            self._forget(stream, why)

    async def _watch_revocations(self, stream: Stream) -> None:
        """End the stream of a site whose certificate is revoked while it is connected."""
        while self.revoked is not None and stream.serial is not None:
            await asyncio.sleep(REVOCATION_SECONDS)
            if self.revoked.has(stream.serial):
                stream.end(grpc.StatusCode.PERMISSION_DENIED, "its certificate was revoked")
                return

    def _forget(self, stream: Stream, why: str) -> None:
        with self.changed:
            if self.sites.get(stream.name) is stream:
                del self.sites[stream.name]
                self.left[stream.name] = time.monotonic()
                if stream.said_goodbye:
                    log.info("%s left", stream.name)
                else:
                    self.note(f"{stream.name} left: {why}")
            self.changed.notify_all()

    async def _listen(self, stream: Stream, context: Context) -> str:
        """Messages in, until the stream ends; a reason if we end it."""
        while True:
            try:
                head, body = await read_large_letter(context.read, self.largest)
            except Ended:
                return ""
            except OSError as e:
                return f"the server has no room for its letter ({e.strerror})"
            except Malformed as e:
                return str(e)
            self.traffic["in"] += len(body)
            self.activity[stream.name].received(len(body))
            with self.changed:
                current = self.sites.get(stream.name) is stream
                refused = self.on_message(stream.name, head, body) if current else None
            del body  # not held until the next one comes
            if refused:
                return refused

    async def _welcome(self, context: Context) -> Stream | None:
        """Check who connects: the name in its certificate, on the list, and the same as in its hello. None: a dry run."""
        name = caller(context)
        try:
            head, _ = await asyncio.wait_for(read_letter(context.read, 0), HELLO_SECONDS)
            hello = Hello.parse(head)
        except Malformed as e:
            raise await self._refuse(context, name, str(e)) from None
        except (TimeoutError, Ended):
            raise await self._refuse(context, name, "no hello came") from None
        name = hello.name if self.insecure else name
        if hello.name != name:
            raise await self._refuse(context, name, f"it calls itself '{hello.name}', and its certificate does not")
        if self.allowed is not None and name not in self.allowed:
            raise await self._refuse(context, name, "it is not on the list of sites")
        certificate = peer_certificate(context)
        if certificate is not None and (stated := role(certificate)) not in ("", "site"):
            raise await self._refuse(context, name, f"its certificate is for the role {stated}, not for a site")
        if certificate is not None and self.revoked is not None and self.revoked.has(certificate.serial_number):
            raise await self._refuse(context, name, "its certificate was revoked")
        if hello.purpose == "dry-run":
            await self._rehearse(hello, context)
            return None
        stream = Stream(hello, serial=certificate.serial_number if certificate else None)
        with self.changed:
            old = self.sites.get(name)
            duplicate = old is not None and old.hello.instance != hello.instance
            if not duplicate:
                if old:
                    old.end(grpc.StatusCode.ABORTED, "a newer stream of the same name took its place")
                self.sites[name] = stream
                log.info("%s is here%s", name, " again" if name in self.left else "")
                self.on_arrival(stream)
                self.changed.notify_all()
        if duplicate:
            raise await self._refuse(context, name, "a site of this name is connected, from another state directory")
        return stream

    async def _rehearse(self, hello: Hello, context: Context) -> None:
        """A dry run hears the terms and counts for nothing."""
        with self.changed:
            terms = self.rehearsal(hello)
        answer = (
            terms or Refusal("the server does not know the shape of the data until its sites are here", True).head()
        )
        for frame in to_frames(answer):
            await context.write(frame)

    async def _refuse(self, context: Context, name: str, why: str) -> BaseException:
        self.note(f"{name or context.peer()} refused: {why}")
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, printable(why))
        return Ended()

    async def _write(self, stream: Stream, context: Context) -> None:
        with suppress(aio.AioRpcError, aio.UsageError, aio.InternalError):  # the connection is lost: `_listen` notices
            while True:
                head, body = await stream.outbox.get()
                for frame in to_frames(head, body):
                    await context.write(frame)
                    self.traffic["out"] += len(frame)
                self.activity[stream.name].sent(len(body))
                if head.get("kind") == "packet":
                    stream.forwarded.release(str(head["from"]), len(body))
                del body

    async def report(self, request: bytes, context: Context) -> bytes:
        """`kilter status`, for sites on the list and for the server itself."""
        name = caller(context)
        with self.changed:
            status = self.status()
        if not self.insecure and self.allowed is not None and name not in self.allowed and name != status.get("me"):
            raise await self._refuse(context, name, "it is not on the list of sites")
        return json.dumps(status).encode()

    # From other threads ------------------------------------------------------------------------------------------------

    def send(self, name: str, head: Head, body: bytes) -> None:
        stream = self.sites.get(name)
        if stream:
            self._thread.loop.call_soon_threadsafe(stream.outbox.put_nowait, (head, body))

    def forward(self, name: str, sender: str, head: Head, body: bytes) -> bool:
        stream = self.sites.get(name)
        if stream is None or not stream.forwarded.admit(sender, len(body)):
            return False
        self.send(name, head, body)
        return True

    def has_room(self, name: str, sender: str) -> bool:
        stream = self.sites.get(name)
        return stream is not None and stream.forwarded.is_empty(sender)

    def drop(self, name: str, why: str) -> None:
        stream = self.sites.get(name)
        if stream:
            self._thread.loop.call_soon_threadsafe(stream.end, grpc.StatusCode.PERMISSION_DENIED, printable(why))

    def close(self, goodbye: Goodbye | None = None) -> None:
        self._thread.run(self._close(goodbye), 15)
        self._thread.stop()

    async def _close(self, goodbye: Goodbye | None) -> None:
        if goodbye:
            with self.changed:
                for stream in self.sites.values():
                    stream.said_goodbye = True
                    stream.outbox.put_nowait((goodbye.head(), b""))
            for _ in range(50):
                await asyncio.sleep(0.02)  # sites leave by themselves when they have read it
                if not self.sites:
                    break
        await self._server.stop(0.2)
