"""The server's end of the sites' streams: a gRPC server in a thread of its own.

Every site holds one stream. Its name is its certificate's; a second stream of the same name takes the first one's place. What
goes in and out are letters; what they mean is `kilter.net.server`'s business.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.fast.memory_layout import keep_memory
from kilter.net.frames import LARGEST, OPTIONS, Ended, Head, cut, read, text
from kilter.net.links import Link, Links
from kilter.net.terms import Facts
from kilter.net.tls import Identity, caller
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

ATTEND, STATUS = "/kilter.Star/Attend", "/kilter.Star/Status"
HELLO_SECONDS = 20.0  # within which whoever opens a stream must say who it is
PROTOCOL = 1


@dataclass(eq=False)
class Stream(Link):
    """One site's stream."""

    outbox: asyncio.Queue[tuple[Head, bytes]] = field(default_factory=asyncio.Queue)
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # a newer stream of the same name has come


class Door(Links):
    """Lets sites in, and letters through."""

    def __init__(
        self,
        listen: str,
        identity: Identity | None,
        allowed: Collection[str] | None,
        largest: int = LARGEST,
    ) -> None:
        keep_memory(large=True)
        super().__init__()
        self.allowed = allowed
        self.largest = largest
        self.insecure = identity is None
        self.links: dict[str, Stream] = {}  # type: ignore[assignment]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kilter-door", daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(listen, identity), self._loop).result()

    async def _open(self, listen: str, identity: Identity | None) -> int:
        self._server = aio.server(options=OPTIONS, maximum_concurrent_rpcs=10_000)
        self._server.add_generic_rpc_handlers((_Service(self),))
        try:
            port = (
                self._server.add_secure_port(listen, identity.for_server())
                if identity
                else self._server.add_insecure_port(listen)
            )
        except (RuntimeError, ValueError):
            port = 0
        if not port:
            raise Mistake(f"Nothing can listen on '{listen}': is the port taken, or the certificate not its key's?")
        await self._server.start()
        return port

    # In the loop's thread --------------------------------------------------------------------------------------------

    async def attend(self, _: Any, context: Any) -> None:
        """A site's stream, from hello to goodbye."""
        link = await self._welcome(context)
        name = link.name
        tasks = [asyncio.create_task(t) for t in (self._listen(link, context), self._write(link, context))]
        over = asyncio.create_task(link.replaced.wait())
        why = "its stream was lost"
        try:
            await asyncio.wait([*tasks, over], return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                await context.abort(grpc.StatusCode.ABORTED, "a newer stream of the same name took this one's place")
            if tasks[0].done() and tasks[0].exception() is None:
                refused = tasks[0].result()
                why = f"refused: {refused}" if refused else "it closed its stream"
                if refused:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused)
        finally:
            for task in (*tasks, over):
                task.cancel()
            with self.changed:
                if self.links.get(name) is link:
                    del self.links[name]
                    self.left[name] = time.monotonic()
                    self.note(f"{name} left: {why}")
                self.changed.notify_all()

    async def _listen(self, link: Stream, context: Any) -> str:
        """Letters in, until the stream ends; a reason if we end it."""
        while True:
            try:
                head, body = await read(context.read, self.largest)
            except Ended:
                return ""
            except Malformed as e:
                return str(e)
            self.traffic["in"] += len(body)
            with self.changed:
                refused = self.letter(link.name, head, body) if self.links.get(link.name) is link else None
            if refused:
                return refused

    async def _welcome(self, context: Any) -> Stream:
        """Who comes: its certificate's name, on the list, and the same that its hello says."""
        name = caller(context)
        try:
            head, _ = await asyncio.wait_for(read(context.read, 0), HELLO_SECONDS)
            said = text(head, "name", 64)
            if head["kind"] != "hello" or head.get("protocol") != PROTOCOL:
                raise Malformed("it speaks another protocol: use the same version of kilter on both sides")
            facts = Facts.read(head.get("facts"))
            card = head.get("card")
        except (Malformed, Mistake) as e:
            raise await self._refuse(context, name, str(e)) from None
        except (TimeoutError, Ended):
            raise await self._refuse(context, name, "no hello came") from None
        name = said if self.insecure else name
        if said != name:
            raise await self._refuse(context, name, f"it calls itself '{said}', and its certificate does not")
        if self.allowed is not None and name not in self.allowed:
            raise await self._refuse(context, name, "it is not on the list of sites")
        link = Stream(name, facts, card if isinstance(card, dict) else {})
        with self.changed:
            old = self.links.get(name)
            if old:
                old.replaced.set()
            self.links[name] = link
            log.info("%s is here%s", name, " again" if name in self.left else "")
            self.arrived(link)
            self.changed.notify_all()
        return link

    async def _refuse(self, context: Any, name: str, why: str) -> BaseException:
        self.note(f"{name or context.peer()} refused: {why}")
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        return Ended()

    async def _write(self, link: Stream, context: Any) -> None:
        with suppress(aio.AioRpcError, aio.UsageError, aio.InternalError):  # the stream is lost: whoever listens knows
            while True:
                for frame in cut(*await link.outbox.get()):
                    await context.write(frame)
                    self.traffic["out"] += len(frame)

    async def report(self, request: bytes, context: Any) -> bytes:
        """`kilter status`, for whoever may come in."""
        name = caller(context)
        if (
            not self.insecure
            and self.allowed is not None
            and name not in self.allowed
            and name != self.status().get("me")
        ):
            raise await self._refuse(context, name, "it is not on the list of sites")
        with self.changed:
            return json.dumps(self.status()).encode()

    # From other threads ------------------------------------------------------------------------------------------------

    def send(self, name: str, head: Head, body: bytes) -> None:
        """A letter to a site, if it is here; hold `changed`."""
        link = self.links.get(name)
        if link:
            self._loop.call_soon_threadsafe(link.outbox.put_nowait, (head, body))

    def close(self, goodbye: Head | None = None) -> None:
        """Say goodbye to those who are here, and shut."""
        asyncio.run_coroutine_threadsafe(self._close(goodbye), self._loop).result(15)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _close(self, goodbye: Head | None) -> None:
        if goodbye:
            with self.changed:
                for link in self.links.values():
                    link.outbox.put_nowait((goodbye, b""))
            for _ in range(50):
                await asyncio.sleep(0.02)  # sites leave by themselves when they have read it
                if not self.links:
                    break
        await self._server.stop(0.2)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, door: Door) -> None:
        self._handlers = {
            ATTEND: grpc.stream_stream_rpc_method_handler(door.attend),
            STATUS: grpc.unary_unary_rpc_method_handler(door.report),
        }

    def service(self, call: Any) -> Any:
        return self._handlers.get(call.method)
