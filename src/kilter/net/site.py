"""The life of a site: it dials out, agrees to the terms, carries out orders one by one, and comes back when cut off.

What leaves a site is made in one place, `answer`: what the step returns, how training went (mean loss and steps of each fit), and
the step's notes. An error leaves as its kind only; the text stays in this site's log.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc import aio

from kilter import data as kdata
from kilter.core import Data, Method, Node, Post, Tree
from kilter.errors import Mistake
from kilter.fast.memory_layout import keep_memory
from kilter.net.frames import LARGEST, OPTIONS, Ended, Head, cut, place, read, text
from kilter.net.grpc_server import ATTEND, PROTOCOL
from kilter.net.seal import Seal
from kilter.net.site_state import Keep
from kilter.net.terms import Facts, Willing, own_data
from kilter.net.tls import Identity
from kilter.records import wire
from kilter.runtimes.base import fingerprint
from kilter.runtimes.reply_checks import checked
from kilter.runtimes.step_names import StepKind, StepName
from kilter.runtimes.step_runner import Done, resolve, run_step

log = logging.getLogger("kilter.net")

FIRST_PAUSE, LONGEST_PAUSE = (
    0.2,
    15.0,
)  # seconds before dialling again; doubled each time, half to once and a half of it
Work = dict[tuple[Any, ...], "asyncio.Task[tuple[Head, bytes]]"]  # orders under way, by life, round and call
FINAL = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}


def answer(done: Done) -> tuple[Head, bytes]:
    """The part of a reply that tells something: all that ever leaves a site."""
    if done.error is not None:
        return {"error": f"the step failed there ({type(done.error).__name__}); see that site's log"}, b""
    post = isinstance(done.reply, Post)
    found = {
        "reply": dict(done.reply) if post else done.reply,
        "fits": [[loss, steps] for loss, steps in done.fits],
        "seconds": done.seconds,
        "notes": done.notes,
    }
    return {"post": post}, wire.encode(found)


@dataclass
class Site:
    """One site: its name, its data, what it is willing to run, where it keeps its state."""

    name: str
    dataset: kdata.Dataset
    state_dir: Path
    willing: Willing = field(default_factory=Willing)
    data_path: str = ""
    identity: Identity | None = None
    largest: int = LARGEST

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # every fit on one thread: the same numbers as in simulation
        self.seal = Seal(self.name, self.identity, self.state_dir)
        self._last: tuple[tuple[str, int, int], tuple[Head, bytes]] | None = None

    keep: Keep | None = field(init=False, default=None)
    run: str = field(init=False, default="")
    method: Method = field(init=False)
    data: Data = field(init=False)
    seed: int = field(init=False, default=0)
    peers: tuple[str, ...] = field(init=False, default=())
    relay: bool = field(init=False, default=False)  # letters to other sites pass through the server, sealed
    met: float = field(init=False, default=-1.0)  # when the server last told its terms

    def hello(self) -> Head:
        facts = Facts.of(self.dataset)
        plain = {"shape": facts.shape, "classes": facts.classes, "mean": facts.mean, "std": facts.std}
        card = self.seal.card()
        return {"kind": "hello", "protocol": PROTOCOL, "name": self.name, "facts": plain, "card": card}

    def agree(self, terms: Mapping[str, Any]) -> None:
        """Build what these terms name, or a Mistake that says why not."""
        if terms.get("run") == self.run and self.keep is not None:
            return
        try:
            facts = Facts.read(terms["facts"])
            if tuple(self.dataset.x.shape[1:]) != facts.shape:
                raise Mistake(
                    f"Rows here have shape {tuple(self.dataset.x.shape[1:])}, and the server wants {facts.shape}."
                )
            if facts.classes != self.dataset.classes:
                self.dataset = kdata.load(self.data_path, classes=facts.classes)
            experiment, self.method = self.willing.build(terms, facts)
            self.peers = tuple(str(p) for p in terms["peers"])
            self.data = own_data(self.dataset, self.name, experiment.seed, experiment.valid)
            self.seed, self.relay = experiment.seed, bool(terms["relay"])
            if self.keep is not None:
                self.keep.close()
            self.keep = Keep(self.state_dir, str(terms["run"]))
            self.run = str(terms["run"])
        except (LookupError, TypeError) as e:
            raise Mistake(f"The server's terms cannot be understood ({type(e).__name__}).") from None

    def carry_out(self, order: Head, body: bytes) -> tuple[Head, bytes]:
        """An order's reply; the same order is never applied twice."""
        assert self.keep is not None
        step, at = text(order, "step", 200), place(order)
        key = (str(order["life"]), *at)
        if self._last and self._last[0] == key:
            return self._last[1]
        try:
            stored = self.keep.begin(order)
            if stored is None:
                stored = self._run(order, step, body)
        except Exception as e:  # whatever it is, the site stays up and the server hears that there is no reply
            log.error("round %d, %s: %s", at[0], step, e, exc_info=None if isinstance(e, Mistake) else e)
            stored = self._signed(order, step, answer(Done(error=e)))
        self._last = key, stored
        return stored

    def _run(self, order: Head, step: str, body: bytes) -> tuple[Head, bytes]:
        assert self.keep is not None
        name = StepName.parse(step)
        self.willing.allow(self.method, name)
        node = self.node(name, order["round"], self.keep.state())
        message = self.opened(order, name, wire.decode(body), node)
        before = fingerprint(node.state)
        began = time.perf_counter()
        (done,) = run_step(resolve(self.method, name), [node], [message])
        if done.error is not None:
            log.error("round %d, %s failed", node.round, step, exc_info=done.error)
            return self._signed(order, step, answer(done))
        reply = self._signed(order, step, answer(self.sealed(order, done)))
        if fingerprint(node.state) != before:
            self.keep.finish(order, node.state, *reply)
        log.info("round %d, %s: %d bytes, %.1f s", node.round, step, len(reply[1]), time.perf_counter() - began)
        return reply

    def node(self, step: StepName, round: int, state: dict[str, Tree]) -> Node:
        return Node(self.name, self.data, self.seed, round, step.step, state, self.peers)

    def opened(self, order: Head, step: StepName, message: Tree, node: Node) -> Tree:
        """The message as the step sees it; a letter that is not what it should be is left out, and noted."""
        if step.kind is StepKind.SPREAD and str(message["view"]).startswith("_"):
            raise wire.Malformed("a view that is not the method's")
        if order.get("mail") is None:
            return message
        box, written = dict(message), order["mail"]
        if self.relay:
            if written["round"] != order["round"] or not 0 < written["seq"] < order["seq"]:
                raise wire.Malformed("mail of another round")
            box = {}
            for sender, letter in message.items():
                try:
                    box[sender] = self.seal.open(letter, sender, order["cards"], {**order, **written})
                except wire.Malformed as e:
                    log.warning("%s", e)
                    node.notes.append(str(e))
        box, notes = checked(box, self.method, StepName.parse(str(written["step"])), self.name)
        node.notes += notes
        return box

    def sealed(self, order: Head, done: Done) -> Done:
        """The outcome as the server may see it: letters to other sites only sealed, and no note on who listens to whom."""
        if not self.relay:
            return done
        done = replace(done, notes=[note for note in done.notes if isinstance(note, str)])
        if not isinstance(done.reply, Post):
            return done
        post = Post()
        for to, letter in done.reply.items():
            try:
                post[to] = self.seal.close(letter, to, order["cards"], order)
            except wire.Malformed as e:
                done.notes.append(str(e))
        return replace(done, kept=post)

    def _signed(self, order: Head, step: str, said: tuple[Head, bytes]) -> tuple[Head, bytes]:
        head = {k: order[k] for k in ("run", "life", "round", "seq")}
        return {"kind": "reply", "from": self.name, "step": step, **head, **said[0]}, said[1]


async def attend(site: Site, server: str, server_name: str, give_up: float = float("inf")) -> None:
    """Stay with the server until the run is over; dial again, ever more patiently, when the stream is lost."""
    keep_memory(large=True)
    pause, site.met = FIRST_PAUSE, time.monotonic()
    work: Work = {}
    while True:
        dialled = time.monotonic()
        async with _channel(site, server, server_name) as channel:
            try:
                stream = channel.stream_stream(ATTEND)()
                if await _session(site, stream, work):
                    return
            except aio.AioRpcError as e:
                if e.code() in FINAL:
                    raise Mistake(f"The server refuses this site: {e.details()}.") from None
                why = (e.details() or e.code().name).splitlines()[0][:200]
                log.warning("not connected to %s: %s", server, why)
            except (Ended, wire.Malformed) as e:
                log.warning("the stream from %s ended %s", server, e)
        if site.met > dialled:
            pause = FIRST_PAUSE
        if time.monotonic() - site.met > give_up:
            raise Mistake(f"The server '{server}' could not be reached for {give_up:.0f} s.")
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, LONGEST_PAUSE)


def _channel(site: Site, server: str, server_name: str) -> aio.Channel:
    if site.identity is None:
        return aio.insecure_channel(server, options=OPTIONS)
    # The server is known by its certificate's name, wherever it is reached.
    options = [*OPTIONS, ("grpc.ssl_target_name_override", server_name)]
    return aio.secure_channel(server, site.identity.for_client(), options=options)


async def _session(site: Site, stream: Any, work: Work) -> bool:
    """One stream, from hello on; true when the run is over."""
    for frame in cut(site.hello()):
        await stream.write(frame)
    head, _ = await read(stream.read, 0)
    if head["kind"] != "terms":
        raise Mistake("The server says something that is not ours.")
    site.met = time.monotonic()
    try:
        await asyncio.to_thread(site.agree, head)
    except Mistake as e:
        for frame in cut({"kind": "refusal", "why": str(e)[:300].replace(chr(10), " ")}):
            await stream.write(frame)
        await stream.done_writing()
        raise
    log.info("here as %s, run %s: %s", site.name, site.run[:8], type(site.method).__name__)
    orders: asyncio.Queue[Any] = asyncio.Queue()
    worker = asyncio.create_task(_work(site, stream, orders, work))
    try:
        while True:
            reader = asyncio.create_task(read(stream.read, site.largest))
            await asyncio.wait({reader, worker}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done() and not reader.done():
                reader.cancel()
                worker.result()
            head, body = reader.result()
            if head["kind"] == "end":
                log.info("the run is finished")
                return True
            if head["kind"] == "order" and head.get("run") == site.run:
                orders.put_nowait((head, body))
    finally:
        worker.cancel()


async def _work(site: Site, stream: Any, orders: asyncio.Queue[Any], work: Work) -> None:
    """Carry out orders; of several that wait, the newest. One that is under way when the stream is lost goes on."""
    while True:
        head, body = await orders.get()
        while not orders.empty():
            head, body = orders.get_nowait()
        key = (head["life"], *place(head))
        for other, task in list(work.items()):
            if other != key:
                await asyncio.wait({task})
                del work[other]
        if key not in work:
            work[key] = asyncio.create_task(asyncio.to_thread(site.carry_out, head, body))
        reply_head, reply_body = await asyncio.shield(work[key])
        for frame in cut(reply_head, reply_body):
            await stream.write(frame)
        work.pop(key, None)
