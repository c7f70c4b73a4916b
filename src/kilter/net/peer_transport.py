"""How a peer's letters reach other peers, over gRPC, in a thread of its own.

A letter is sent until its receiver has it, is past its round, or is gone. Letters of this round and the last one, and letters that
a receiver may still need, are kept for a peer that comes back and asks. Received letters wait in the box of their round, call and
sender; the first one of each counts, and a sender can only fill a bounded box.
Whether a peer is gone is decided by each peer from its own connection to it: what others say about it is not evidence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.fast.memory_layout import keep_memory
from kilter.net.fields import Place, printable
from kilter.net.frames import LARGEST, OPTIONS, Ended, parse_json, read_letter, to_frames
from kilter.net.grpc_server import STATUS, Context
from kilter.net.messages import PeerAnswer, PeerHello, PeerLetter
from kilter.net.ports import LoopThread, open_port
from kilter.net.tls import Identity, caller
from kilter.records.wire import Malformed

log = logging.getLogger("kilter.net")

PUT, HELLO = "/kilter.Peers/Put", "/kilter.Peers/Hello"
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds before a letter is sent again
DOWN = 3.0  # seconds without a connection after which a finished peer no longer waits for a receiver
AHEAD = 64  # most letters of one sender that wait for a later call of mine


class PeerTransport:
    """`changed` guards and announces everything that other threads look at."""

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
        self.rounds: dict[str, int] = {}  # the latest round that each peer was heard from in
        self.down: dict[str, float] = {}  # since when a peer cannot be reached
        self.gone: dict[str, int] = {}  # peers that I no longer wait for, and since which round
        self.inbox: dict[tuple[Place, str], tuple[PeerLetter, bytes]] = {}
        self.traffic: Counter[str] = Counter()
        self.last_error = ""
        self.status: Callable[[], dict[str, object]] = dict
        self._sent: dict[Place, dict[str, tuple[PeerLetter, bytes]]] = {}
        self._pending: dict[asyncio.Task[None], tuple[str, Place]] = {}  # letters on their way
        self._thread = LoopThread("kilter-peer")
        try:
            self._server, self.port = self._thread.run(self._open(listen))
        except Mistake:
            self._thread.stop()
            raise

    async def _open(self, listen: str) -> tuple[aio.Server, int]:
        self._channels = {name: self._channel(name, address) for name, address in self.others.items()}
        self._awake = {name: asyncio.Event() for name in self.others}  # set when a peer that was away is heard from
        handlers = {
            PUT: grpc.stream_unary_rpc_method_handler(self.put),
            HELLO: grpc.unary_unary_rpc_method_handler(self.hello),
            STATUS: grpc.unary_unary_rpc_method_handler(self.report),
        }
        return await open_port(handlers, listen, self.identity, 1000)

    def _channel(self, name: str, address: str) -> aio.Channel:
        if self.identity is None:
            return aio.insecure_channel(address, options=OPTIONS)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        return aio.secure_channel(address, self.identity.for_client(), options=options)

    # Requests of others, in the loop's thread -------------------------------------------------------------------------

    async def _check_sender(self, context: Context, message: PeerLetter | PeerHello) -> str:
        """The sender: the name in its certificate, one of the peers, of this run, writing to me."""
        name = caller(context) if self.identity else message.sender
        why = ""
        if message.sender != name:
            why = "it signs with another's name"
        elif name not in self.others:
            why = "it is not one of the peers"
        elif message.run != self.run:
            why = "it takes part in another run: the experiments or the lists of peers differ"
        elif message.to != self.me:
            why = "it sent a letter that is not for me"
        if why:
            self.note(f"{name or context.peer()} refused: {why}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        return name

    async def put(self, _: object, context: Context) -> bytes:
        """A letter arrives."""
        try:
            head, body = await read_letter(context.read, self.largest)
            letter = PeerLetter.parse(head)
        except (Malformed, Ended) as e:
            self.note(f"{caller(context) or context.peer()} refused: {e or 'half a letter'}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(e)))
            raise
        name = await self._check_sender(context, letter)
        self.traffic["in"] += len(body)
        with self.changed:
            given_up = name in self.gone
            self._heard(name, letter.round)
            self.missed |= self.me in letter.gave_up
            early = self._is_early(name, letter, len(body))
            if self.round <= letter.round and not early:
                self.inbox.setdefault((letter.place, name), (letter, body))
            self.changed.notify_all()
        if early:  # its sender keeps it until I am there
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it is too early for this letter")
        return json.dumps(PeerAnswer(self.round, given_up).head()).encode()

    def _is_early(self, name: str, letter: PeerLetter, size: int) -> bool:
        """Whether a letter must wait at its sender: far ahead, or its sender's box is full."""
        if letter.round > self.round + 1:
            return True
        if letter.place == (self.round, self.seq) or letter.round < self.round:
            return False
        held = [len(body) for (place, who), (_, body) in self.inbox.items() if who == name and place != letter.place]
        return len(held) >= AHEAD or (bool(held) and sum(held) + size > self.largest)

    async def hello(self, request: bytes, context: Context) -> bytes:
        """A peer is there, and says from which round on it needs letters again."""
        try:
            message = PeerHello.parse(parse_json(request, "a hello"))
        except Malformed as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(e)))
            raise
        name = await self._check_sender(context, message)
        with self.changed:
            given_up = name in self.gone
            self._heard(name, message.round)
            on_their_way = set(self._pending.values())
            for at, letters in self._sent.items():
                if at[0] >= message.round and name in letters and (name, at) not in on_their_way:
                    self._post(name, *letters[name])
            self.changed.notify_all()
        return json.dumps(PeerAnswer(self.round, given_up).head()).encode()

    async def report(self, request: bytes, context: Context) -> bytes:
        """`kilter status`, for the peers."""
        if self.identity and caller(context) not in (*self.others, self.me):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "it is not one of the peers")
        return json.dumps(self.status()).encode()

    def _heard(self, name: str, round: int) -> None:
        if name not in self.rounds or name in self.gone:
            log.info("%s is here", name)
        self.rounds[name] = max(round, self.rounds.get(name, -1))
        self.gone.pop(name, None)
        if self.down.pop(name, None) is not None:  # a new channel need not wait for the old one's next attempt
            self._thread.loop.create_task(self._channels[name].close())
            self._channels[name] = self._channel(name, self.others[name])
            self._awake[name].set()

    def _post(self, to: str, letter: PeerLetter, body: bytes) -> None:
        task = self._thread.loop.create_task(self._deliver(to, letter, body))
        self._pending[task] = to, letter.place
        task.add_done_callback(lambda done: self._pending.pop(done, None))

    async def _deliver(self, to: str, letter: PeerLetter, body: bytes) -> None:
        """Send a letter until it has arrived, or nobody needs it any more."""
        pause = FIRST_PAUSE
        while not self._is_over(to, letter.round):
            channel = self._channels[to]
            try:
                data = await channel.stream_unary(PUT)(_frames(letter, body))
                answer = PeerAnswer.parse(parse_json(data, "an answer"))
                with self.changed:
                    self.down.pop(to, None)
                    self.rounds[to] = max(answer.round, self.rounds.get(to, -1))
                    self.missed |= answer.gave_up
                self.traffic["out"] += len(body)
                return
            except aio.AioRpcError as e:
                if e.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
                    self.note(f"{to} refuses a letter: {e.details()}")
                    return
                if e.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED and channel is self._channels[to]:
                    with self.changed:
                        self.down.setdefault(to, time.monotonic())
                        self.changed.notify_all()
            except Malformed:
                self.note(f"{to} answers something that cannot be used")
            except asyncio.CancelledError:
                if channel is self._channels[to]:
                    raise  # this peer closes; otherwise only the old channel did
            with suppress(TimeoutError):
                await asyncio.wait_for(self._awake[to].wait(), pause)
            self._awake[to].clear()
            pause = min(2 * pause, LONGEST_PAUSE)

    def _is_over(self, to: str, round: int) -> bool:
        """Whether nobody needs letters of this round to this peer any more."""
        return self.rounds.get(to, -1) > round or (to in self.gone and round < self.round - 1)

    def note(self, what: str) -> None:
        what = printable(what)
        log.warning("%s", what)
        self.last_error = what

    # From other threads ------------------------------------------------------------------------------------------------

    def send(self, at: Place, letters: Mapping[str, tuple[PeerLetter, bytes]]) -> None:
        """Send these letters, {receiver: (letter, body)}, written at this place."""
        with self.changed:
            self._sent[at] = dict(letters)
            for to, letter in self._sent[at].items():
                self._thread.loop.call_soon_threadsafe(self._post, to, *letter)

    def enter(self, round: int) -> None:
        """I am in this round now; older letters are over."""
        with self.changed:
            self.round, self.seq = round, 0
            self._sent = {
                at: letters
                for at, letters in self._sent.items()
                if at[0] >= round - 1 or not all(self._is_over(to, at[0]) for to in letters)
            }
            self.inbox = {key: v for key, v in self.inbox.items() if key[0][0] >= round}

    def greet(self, round: int) -> dict[str, int]:
        """Which peers are there, and in which round; they send again what I may have lost since this round."""
        return dict(self._thread.run(self._greet(round)))

    async def _greet(self, round: int) -> dict[str, int]:
        async def one(name: str) -> tuple[str, int | None]:
            hello = json.dumps(PeerHello(self.run, self.me, name, round).head()).encode()
            try:
                data = await self._channels[name].unary_unary(HELLO)(hello, timeout=5)
                answer = PeerAnswer.parse(parse_json(data, "an answer"))
            except aio.AioRpcError as e:
                if e.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise Mistake(f"{name} refuses this peer: {printable(e.details() or '')}.") from None
                return name, None
            except Malformed:
                return name, None
            self.missed |= answer.gave_up
            return name, answer.round

        return {name: at for name, at in await asyncio.gather(*map(one, self.others)) if at is not None}

    def flush(self, seconds: float) -> None:
        """Wait until my letters have arrived, or their receivers cannot be reached (most likely they have finished, too)."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and any(
            now - self.down.get(to, now) < DOWN for to, _ in list(self._pending.values())
        ):
            time.sleep(0.02)

    def close(self) -> None:
        self._thread.run(self._close(), 15)
        self._thread.stop()

    async def _close(self) -> None:
        for task in list(self._pending):
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        await self._server.stop(0.2)


async def _frames(letter: PeerLetter, body: bytes) -> AsyncIterator[Any]:
    for frame in to_frames(letter.head(), body):
        yield frame
