"""Direct links between the sites of a rotating federation: every site has a port, and packets go straight to their receiver.

Sites greet each other every second. A site that does not answer is away; its packets are lost. Greetings say how many were, so both
sides know it when they meet again, and send again what still matters. What waits is bounded in bytes, by site: a receiver refuses
more, and the sender sends it again later. Packets are sealed here, too, so that both kinds of links have the same properties.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.net.byte_budget import ByteBudget
from kilter.net.fields import Fields
from kilter.net.frames import LARGEST, OPTIONS, Ended, Head, parse_json, read_body, read_head, to_frames
from kilter.net.grpc_server import STATUS
from kilter.net.links import Links
from kilter.net.names import printable
from kilter.net.ports import LoopThread, open_port
from kilter.net.seal import Seal
from kilter.net.tls import Identity, caller
from kilter.net.turns import Packet, Ready
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

PACKET, GREET = "/kilter.Turns/Packet", "/kilter.Turns/Greet"
GREETING_SECONDS = 1.0  # between two greetings
GREETING_TIMEOUT = 5.0
RETRY_SECONDS, LONGEST_RETRY = 0.2, 2.0  # before a packet is sent again to a site that is there
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)  # not reached, or no room there
Context = Any  # gRPC has no types


class DirectLinks(Links):
    """`ready` says what the others must know about this site; greetings start with `open`."""

    def __init__(
        self,
        run: str,
        seal: Seal,
        addresses: Mapping[str, str],
        listen: str,
        identity: Identity | None,
        largest: int = LARGEST,
    ) -> None:
        super().__init__(run, seal, largest)
        self._identity = identity
        self._others = {name: address for name, address in addresses.items() if name != self.me}
        self._ready: Callable[[], Ready] | None = None
        self._there: dict[str, tuple[Ready, int]] = {}
        self._lost = Counter[str]()  # packets that did not arrive, by receiver
        self._losses: dict[str, tuple[int, int]] = {}  # by site: packets that did not arrive there, and here from there
        self._renewed: dict[str, float] = {}  # when each site last had a new connection
        self._connections = 0
        self._inbox_budget, self._outbox_budget = ByteBudget(), ByteBudget()
        self._overflowed: set[str] = set()  # sites for which a packet did not fit into the outbox
        self._inbox: queue.Queue[tuple[Packet, bytes] | None] = queue.Queue()
        self.status: Callable[[], dict[str, object]] = dict
        self._announcer = ThreadPoolExecutor(1, "kilter-presence")
        self._thread = LoopThread("kilter-links")
        try:
            self._server, self.port = self._thread.run(self._listen(listen))
        except Mistake:
            self._thread.stop()
            raise

    async def _listen(self, listen: str) -> tuple[aio.Server, int]:
        self._channels = {name: self._channel(name, address) for name, address in self._others.items()}
        self._outboxes: dict[str, asyncio.Queue[tuple[Packet, bytes]]] = {n: asyncio.Queue() for n in self._others}
        handlers = {
            PACKET: grpc.stream_unary_rpc_method_handler(self._take_packet),
            GREET: grpc.unary_unary_rpc_method_handler(self._take_greeting),
            STATUS: grpc.unary_unary_rpc_method_handler(self._report),
        }
        return await open_port(handlers, listen, self._identity, 1000)

    def _channel(self, name: str, address: str) -> aio.Channel:
        if self._identity is None:
            return aio.insecure_channel(address, options=OPTIONS)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        return aio.secure_channel(address, self._identity.for_client(), options=options)

    def open(self, ready: Callable[[], Ready]) -> None:
        """Start to greet the others, and to pass on their packets."""
        self._ready = ready
        threading.Thread(target=self._pass_on, name="kilter-packets", daemon=True).start()
        self._tasks = self._thread.run(self._start())

    async def _start(self) -> list[asyncio.Task[None]]:
        work = [self._greet_forever(), *(self._send_forever(name) for name in self._others)]
        return [asyncio.ensure_future(one) for one in work]

    def _pass_on(self) -> None:
        """Open packets in a thread of their own, in the order in which they came."""
        while (item := self._inbox.get()) is not None:
            self.receive(*item)
            self._inbox_budget.release(item[0].sender, len(item[1]))

    # In the loop's thread -------------------------------------------------------------------------------------------

    async def _check(self, context: Context, name: str, run: object) -> None:
        """Refuse a caller whose certificate does not name it, or that takes part in another run."""
        why = ""
        if self._identity is not None and caller(context) != name:
            why = "it signs with another's name"
        elif name not in self._others:
            why = "it is not one of the peers"
        elif run != self.run:
            why = "it takes part in another run: the experiments or the lists of peers differ"
        if why:
            self.note(f"{name} refused: {why}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    async def _take_packet(self, _: object, context: Context) -> bytes:
        """A packet arrives. Its room is booked before its body is read."""
        try:
            head, size = await read_head(context.read, self.largest)
            packet = Packet.parse(head)
            await self._check(context, packet.sender, packet.run)
            if not self._inbox_budget.admit(packet.sender, size):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many bytes of this sender wait here")
            try:
                self._inbox.put((packet, await read_body(context.read, size)))
            except BaseException:
                self._inbox_budget.release(packet.sender, size)
                raise
        except (Malformed, Ended) as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(e) or "half a letter"))
            raise
        return b"{}"

    async def _take_greeting(self, request: bytes, context: Context) -> bytes:
        try:
            head = parse_json(request, "a greeting")
            ready, lost = Ready.parse(head), _lost(head)
        except Malformed as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(e)))
            raise
        await self._check(context, ready.name, head.get("run"))
        if self._ready is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is not ready yet")
        self._note_presence(ready, lost)
        return self._greeting(ready.name)

    async def _report(self, request: bytes, context: Context) -> bytes:
        """`kilter status`, for the peers."""
        if self._identity and caller(context) not in (*self._others, self.me):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "it is not one of the peers")
        return json.dumps(self.status()).encode()

    def _greeting(self, to: str) -> bytes:
        assert self._ready is not None
        return json.dumps({**self._ready().head(), "run": self.run, "lost": self._lost[to]}).encode()

    def _note_presence(self, ready: Ready, lost: int) -> None:
        """A site is there. A new process, or a packet that was lost on the way there or here, makes it a new connection.

        That happens at most once a second: a site that claims losses in every greeting costs one more letter a second.
        """
        known, losses, now = self._there.get(ready.name), (self._lost[ready.name], lost), time.monotonic()
        if known is None or known[0].nonce != ready.nonce or self._losses.get(ready.name) != losses:
            if now - self._renewed.get(ready.name, -math.inf) < GREETING_SECONDS:
                return
            self._losses[ready.name], self._renewed[ready.name] = losses, now
            self._connections += 1
            number = self._connections
        elif known[0] == ready:
            return
        else:
            number = known[1]
        self._there[ready.name] = ready, number
        self._announce()

    def _announce(self) -> None:
        """Tell the others' presence, in a thread of its own and in the order of events."""
        self._announcer.submit(self.update, dict(self._there))

    async def _greet_forever(self) -> None:
        self._announce()
        while True:
            await asyncio.gather(*map(self._greet, self._others))
            await asyncio.sleep(GREETING_SECONDS)

    async def _greet(self, name: str) -> None:
        try:
            answer = await self._channels[name].unary_unary(GREET)(self._greeting(name), timeout=GREETING_TIMEOUT)
            head = parse_json(answer, "an answer")
            ready = Ready.parse(head)
            if ready.name != name:
                raise Malformed("it answers with another's name")
            self._note_presence(ready, _lost(head))
        except (aio.AioRpcError, Malformed) as e:
            if isinstance(e, aio.AioRpcError) and e.code() is grpc.StatusCode.PERMISSION_DENIED:
                self.note(f"{name} refuses this site: {e.details()}")
            if self._there.pop(name, None) is not None:
                self._announce()

    async def _send_forever(self, name: str) -> None:
        """Packets to one site, one after another. A packet is lost when its receiver leaves, or refuses it."""
        while True:
            packet, sealed = await self._outboxes[name].get()
            before, pause = self._there.get(name), RETRY_SECONDS
            while why := await self._deliver(name, packet, sealed):
                now = self._there.get(name)
                if before and now and before[0].nonce == now[0].nonce and why.code() in AGAIN:
                    # It is there: the channel waits after an earlier attempt, or the site has no room yet.
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_RETRY)
                    continue
                log.info("a packet to %s was lost: %s", name, printable(why.details() or why.code().name))
                self._lost[name] += 1
                break
            self._outbox_budget.release(name, len(sealed))
            if name in self._overflowed and self._outbox_budget.is_empty(name):
                self._overflowed.discard(name)
                self._lost[name] += 1

    async def _deliver(self, name: str, packet: Packet, sealed: bytes) -> aio.AioRpcError | None:
        """Send a packet once; the error, if it did not arrive."""
        try:
            await self._channels[name].stream_unary(PACKET)(_frames(packet, sealed))
        except aio.AioRpcError as e:
            return e
        return None

    # From other threads ---------------------------------------------------------------------------------------------

    def post(self, packet: Packet, sealed: bytes) -> None:
        if self._outbox_budget.admit(packet.to, len(sealed)):
            self._thread.loop.call_soon_threadsafe(self._outboxes[packet.to].put_nowait, (packet, sealed))
        else:  # it counts as lost when the others have been sent: what still matters is then sent again
            self._overflowed.add(packet.to)

    def flush(self) -> bool:
        """Whether nothing waits to be sent."""
        return all(outbox.empty() for outbox in self._outboxes.values())

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.run(self._close(), 15)
        self._thread.stop()
        self._announcer.shutdown(wait=False)

    async def _close(self) -> None:
        for task in getattr(self, "_tasks", []):
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        await self._server.stop(0.2)


def _lost(head: Head) -> int:
    """How many packets to me the sender of a greeting has lost."""
    return Fields(head, "a greeting").integer("lost")


async def _frames(packet: Packet, sealed: bytes) -> AsyncIterator[bytes]:
    for frame in to_frames(packet.head(), sealed):
        yield frame
