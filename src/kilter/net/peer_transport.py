"""A peer's post office: letters to and from other peers, over gRPC, in a thread of its own.

A letter is sent until its receiver has it, is past its round, or is gone; what was written in this round and the last, and what a
receiver may still need, is kept for one that comes back and asks. Received letters lie in the box of their round, call and sender,
the first one of each counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.fast.memory_layout import keep_memory
from kilter.net.frames import LARGEST, OPTIONS, Ended, Head, cut, place, read, text
from kilter.net.grpc_server import STATUS
from kilter.net.tls import Identity, caller
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

PUT, HELLO = "/kilter.Peers/Put", "/kilter.Peers/Hello"
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds before a letter is sent again
DOWN = 3.0  # seconds without a connection after which one who is done no longer waits for a receiver
WINDOW = 256  # how many calls ahead of mine a letter may be
Place = tuple[int, int]


class Office:
    """`changed` guards and announces everything that others look at."""

    def __init__(
        self,
        me: str,
        addresses: Mapping[str, str],
        listen: str,
        run: str,
        identity: Identity | None,
        largest: int = LARGEST,
    ) -> None:
        keep_memory(large=True)
        self.me, self.run, self.largest, self.identity = me, run, largest, identity
        self.others = {name: address for name, address in addresses.items() if name != me}
        self.changed = threading.Condition()
        self.round, self.seq = 0, 0  # where I am
        self.missed = False  # the others went on without me
        self.rounds: dict[str, int] = {}  # where the others are, as far as I have heard from them
        self.down: dict[str, float] = {}  # since when a peer cannot be reached
        self.gone: dict[str, int] = {}  # who is gone, and since which round; told on
        self.inbox: dict[tuple[Place, str], tuple[Head, bytes]] = {}
        self.traffic: Counter[str] = Counter()
        self.last_error = ""
        self.status: Callable[[], dict[str, Any]] = dict
        self._sent: dict[Place, dict[str, tuple[Head, bytes]]] = {}
        self._pending: dict[asyncio.Task[None], str] = {}  # letters under way, and to whom
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kilter-office", daemon=True)
        self._thread.start()
        self.port: int = self._await(self._open(listen))

    def _await(self, work: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    async def _open(self, listen: str) -> int:
        self._lines = {name: self._line(name, address) for name, address in self.others.items()}
        self._awake = {name: asyncio.Event() for name in self.others}  # set when one that was away is heard of
        self._server = aio.server(options=OPTIONS, maximum_concurrent_rpcs=1000)
        self._server.add_generic_rpc_handlers((_Service(self),))
        try:
            port = (
                self._server.add_secure_port(listen, self.identity.for_server())
                if self.identity
                else self._server.add_insecure_port(listen)
            )
        except (RuntimeError, ValueError):
            port = 0
        if not port:
            raise Mistake(f"Nothing can listen on '{listen}': is the port taken, or the certificate not its key's?")
        await self._server.start()
        return port

    def _line(self, name: str, address: str) -> aio.Channel:
        if self.identity is None:
            return aio.insecure_channel(address, options=OPTIONS)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        return aio.secure_channel(address, self.identity.for_client(), options=options)

    # What others ask, in the loop's thread ---------------------------------------------------------------------------

    async def _who(self, context: Any, head: Head) -> str:
        """The sender of a letter: its certificate's name, one of the peers, of this run, writing to me."""
        name = caller(context) if self.identity else text(head, "from", 64)
        why = ""
        if text(head, "from", 64) != name:
            why = "it signs with another's name"
        elif name not in self.others:
            why = "it is not one of the peers"
        elif head.get("run") != self.run:
            why = "it takes part in another run: the experiments or the lists of peers differ"
        elif head.get("to") != self.me:
            why = "a letter that is not for me"
        if why:
            self.note(f"{name or context.peer()} refused: {why}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        return name

    async def put(self, _: Any, context: Any) -> bytes:
        """A letter comes in."""
        try:
            head, body = await read(context.read, self.largest)
            name = await self._who(context, head)
            at = place(head)
            told = head.get("gone")
            told = told if isinstance(told, dict) else {}
        except (Malformed, Ended) as e:
            self.note(f"{caller(context) or context.peer()} refused: {e or 'half a letter'}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
            raise
        self.traffic["in"] += len(body)
        with self.changed:
            given_up = name in self.gone
            self._heard(name, at[0])
            self.missed |= self.me in told
            for who, since in told.items():
                if who in self.others and isinstance(since, int) and self.rounds.get(who, -1) < since:
                    self.gone.setdefault(who, since)
            ahead = at[0] > self.round + 1 or (at[0] == self.round and at[1] > self.seq + WINDOW)
            if self.round <= at[0] and not ahead:
                self.inbox.setdefault((at, name), (head, body))
            self.changed.notify_all()
        if ahead:  # kept by its sender until I am there
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it is too early for this letter")
        return json.dumps({"round": self.round, "gone": given_up}).encode()

    async def hello(self, request: bytes, context: Any) -> bytes:
        """A peer is there, and says from which round on it needs letters again."""
        try:
            head = json.loads(request)
            if not isinstance(head, dict):
                raise Malformed("a hello that is none")
            name = await self._who(context, head)
            since, _ = place({"round": head.get("round"), "seq": 0})
        except (ValueError, RecursionError, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a hello that is none")
            raise
        with self.changed:
            given_up = name in self.gone
            self._heard(name, since)
            for at, letters in self._sent.items():
                if at[0] >= since and name in letters:
                    self._post(name, *letters[name])
            self.changed.notify_all()
        return json.dumps({"round": self.round, "gone": given_up}).encode()

    async def report(self, request: bytes, context: Any) -> bytes:
        """`kilter status`, for the peers."""
        if self.identity and caller(context) not in (*self.others, self.me):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "it is not one of the peers")
        return json.dumps(self.status()).encode()

    def _heard(self, name: str, round: int) -> None:
        if name not in self.rounds or name in self.gone:
            log.info("%s is here", name)
        self.rounds[name] = max(round, self.rounds.get(name, -1))
        self.gone.pop(name, None)
        if self.down.pop(name, None) is not None:  # a new line need not wait for the old one's next attempt
            self._loop.create_task(self._lines[name].close())
            self._lines[name] = self._line(name, self.others[name])
            self._awake[name].set()

    def _post(self, to: str, head: Head, body: bytes) -> None:
        task = self._loop.create_task(self._deliver(to, head, body))
        self._pending[task] = to
        task.add_done_callback(lambda done: self._pending.pop(done, None))

    async def _deliver(self, to: str, head: Head, body: bytes) -> None:
        """Send a letter until it is there, or its time is over."""
        pause = FIRST_PAUSE
        while not self._is_over(to, head["round"]):
            line = self._lines[to]
            try:
                answer = json.loads(await line.stream_unary(PUT)(_frames(head, body)))
                with self.changed:
                    self.down.pop(to, None)
                    self.rounds[to] = max(int(answer["round"]), self.rounds.get(to, -1))
                    self.missed |= bool(answer.get("gone"))
                self.traffic["out"] += len(body)
                return
            except aio.AioRpcError as e:
                if e.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
                    self.note(f"{to} refuses a letter: {e.details()}")
                    return
                if e.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED and line is self._lines[to]:
                    with self.changed:
                        self.down.setdefault(to, time.monotonic())
                        self.changed.notify_all()
            except (ValueError, LookupError, TypeError, AttributeError):
                self.note(f"{to} answers something that is not ours")
            except asyncio.CancelledError:
                if line is self._lines[to]:
                    raise  # the office closes; else only the old line did
            with suppress(TimeoutError):
                await asyncio.wait_for(self._awake[to].wait(), pause)
            self._awake[to].clear()
            pause = min(2 * pause, LONGEST_PAUSE)

    def _is_over(self, to: str, round: int) -> bool:
        """Whether nobody needs letters of this round to this peer any more."""
        return self.rounds.get(to, -1) > round or (to in self.gone and round < self.round - 1)

    def note(self, what: str) -> None:
        log.warning("%s", what)
        self.last_error = what

    # From other threads ------------------------------------------------------------------------------------------------

    def send(self, at: Place, letters: Mapping[str, tuple[Head, bytes]]) -> None:
        """These letters, {receiver: (head, body)}, written in this place."""
        with self.changed:
            self._sent[at] = {to: ({**head, "gone": dict(self.gone)}, body) for to, (head, body) in letters.items()}
            for to, letter in self._sent[at].items():
                self._loop.call_soon_threadsafe(self._post, to, *letter)

    def enter(self, round: int) -> None:
        """I am in this round now: what is older is over."""
        with self.changed:
            self.round, self.seq = round, 0
            self._sent = {
                at: v
                for at, v in self._sent.items()
                if at[0] >= round - 1 or not all(self._is_over(to, at[0]) for to in v)
            }
            self.inbox = {key: v for key, v in self.inbox.items() if key[0][0] >= round}

    def greet(self, round: int) -> dict[str, int]:
        """Who of the others is there, and in which round; they send again what I may have lost since this round."""
        return dict(self._await(self._greet(round)))

    async def _greet(self, round: int) -> dict[str, int]:
        async def one(name: str) -> tuple[str, int | None]:
            head = {"from": self.me, "to": name, "run": self.run, "round": round}
            try:
                answer = await self._lines[name].unary_unary(HELLO)(json.dumps(head).encode(), timeout=5)
                told = json.loads(answer)
                self.missed |= bool(told["gone"])
                return name, int(told["round"])
            except aio.AioRpcError as e:
                if e.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise Mistake(f"{name} refuses this peer: {e.details()}.") from None
                return name, None
            except (ValueError, LookupError, TypeError):
                return name, None

        return {name: at for name, at in await asyncio.gather(*map(one, self.others)) if at is not None}

    def flush(self, seconds: float) -> None:
        """Wait until what I wrote has arrived, or its receiver cannot be reached: it has most likely finished, too."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and any(
            now - self.down.get(to, now) < DOWN for to in list(self._pending.values())
        ):
            time.sleep(0.02)

    def close(self) -> None:
        self._await(self._close(), 15)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _close(self) -> None:
        for task in list(self._pending):
            task.cancel()
        await asyncio.gather(*(line.close() for line in self._lines.values()))
        await self._server.stop(0.2)


async def _frames(head: Head, body: bytes) -> Any:
    for frame in cut(head, body):
        yield frame


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, office: Office) -> None:
        self._handlers = {
            PUT: grpc.stream_unary_rpc_method_handler(office.put),
            HELLO: grpc.unary_unary_rpc_method_handler(office.hello),
            STATUS: grpc.unary_unary_rpc_method_handler(office.report),
        }

    def service(self, call: Any) -> Any:
        return self._handlers.get(call.method)
