"""A site's connection to its server: it dials out, says hello, hears the terms, answers orders, and reconnects when cut off."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from typing import Any

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.fast.memory_layout import keep_memory
from kilter.net.frames import OPTIONS, Ended, Head, read_letter, to_frames
from kilter.net.grpc_server import ATTEND, JOB_KEY
from kilter.net.messages import Goodbye, Order, Refusal, Reply, kind_of
from kilter.net.names import printable
from kilter.net.relay_links import RelaySession
from kilter.net.site import Site
from kilter.net.terms import Terms
from kilter.records import wire

log = logging.getLogger("kilter.net")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0  # seconds before dialling again; doubled each time, with 50 % jitter
HANDSHAKES = 3  # TLS handshakes that may fail one after another before the site gives up
BAD_HANDSHAKE = re.compile(r"CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER|handshake failed|Ssl|SSL_ERROR|TSI_")
FINAL = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
RunningOrders = dict[tuple[str, int, int], "asyncio.Task[tuple[Reply, bytes]]"]  # by session, round and call
Stream = Any  # gRPC has no types


def open_channel(site: Site, server: str) -> aio.Channel:
    if site.identity is None:
        return aio.insecure_channel(server, options=OPTIONS)
    # The server is identified by the name in its certificate, whatever its address.
    options = [*OPTIONS, ("grpc.ssl_target_name_override", site.server_name)]
    return aio.secure_channel(server, site.identity.for_client(), options=options)


def route(site: Site) -> tuple[tuple[str, str], ...]:
    """Metadata by which a hub finds the run of a stream; a server of a single run needs none."""
    return ((JOB_KEY, str(site.job)),) if site.job else ()


async def attend(site: Site, server: str, give_up: float = float("inf")) -> None:
    """Stay with the server until the run is over; reconnect with growing pauses when the connection is lost."""
    keep_memory(large=True)
    pause, site.last_contact, handshakes = FIRST_PAUSE, time.monotonic(), 0
    running: RunningOrders = {}
    relayed = RelaySession(site)
    while True:
        dialled = time.monotonic()
        site.renew()
        async with open_channel(site, server) as channel:
            try:
                stream = channel.stream_stream(ATTEND)(metadata=route(site))
                if await _session(site, stream, running, relayed):
                    return
            except aio.AioRpcError as e:
                why = printable((e.details() or e.code().name).splitlines()[0], 200)
                if e.code() in FINAL:
                    raise Mistake(f"The server refuses this site: {why}.") from None
                handshakes = handshakes + 1 if BAD_HANDSHAKE.search(e.details() or "") else 0
                if handshakes >= HANDSHAKES:
                    raise Mistake(
                        f"No secure connection to '{server}': it does not use TLS, its certificate is from another "
                        f"authority than ca.pem, or it is not named '{site.server_name}' ({why})."
                    ) from None
                log.warning("not connected to %s: %s", server, why)
            except Ended:
                log.warning("the connection to %s was lost", server)
            except wire.Malformed as e:
                log.warning("the server %s sent something that cannot be used: %s", server, printable(str(e)))
        if site.last_contact > dialled:
            pause = FIRST_PAUSE
        if time.monotonic() - site.last_contact > give_up:
            raise Mistake(f"The server '{server}' could not be reached for {give_up:.0f} s.")
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, LONGEST_PAUSE)


async def write(stream: Stream, head: Head, body: bytes = b"") -> None:
    for frame in to_frames(head, body):
        await stream.write(frame)


async def _session(site: Site, stream: Stream, running: RunningOrders, relayed: RelaySession) -> bool:
    """One connection, from hello on; true when the run is over."""
    hello = site.hello().head()
    site.audit.record("hello", next(to_frames(hello)), kinds="data description, row count", to=site.server_name)
    await write(stream, hello)
    head, _ = await read_letter(stream.read, 0)
    if kind_of(head) == "goodbye":
        return _is_over(Goodbye.parse(head))
    terms = await _agree(site, stream, head)
    log.info("here as %s, run %s: %s", site.name, terms.run[:8], type(site.method).__name__)
    if terms.rotates:
        return await relayed.attend(stream, _agree)
    orders: asyncio.Queue[tuple[Order, bytes]] = asyncio.Queue(maxsize=16)
    worker = asyncio.create_task(_work(site, stream, orders, running))
    try:
        while True:
            reader = asyncio.create_task(read_letter(stream.read, site.largest))
            await asyncio.wait({reader, worker}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done() and not reader.done():
                reader.cancel()
                worker.result()
            head, body = reader.result()
            if kind_of(head) == "goodbye":
                return _is_over(Goodbye.parse(head))
            if kind_of(head) == "terms":  # they hold the preparation of the data now
                terms = await _agree(site, stream, head)
            if kind_of(head) == "order":
                order = Order.parse(head)
                if order.run == terms.run:
                    await orders.put((order, body))
    finally:
        worker.cancel()


async def _agree(site: Site, stream: Stream, head: Head) -> Terms:
    """Agree to the terms, or refuse them and say why."""
    terms = Terms.parse(head)
    site.last_contact = time.monotonic()
    try:
        await asyncio.to_thread(site.agree, terms)
    except Mistake as e:
        await write(stream, Refusal(str(e)).head())
        await stream.done_writing()
        raise
    return terms


def _is_over(goodbye: Goodbye) -> bool:
    if goodbye.finished:
        log.info("the run is finished")
    else:
        log.warning("the server stopped%s; waiting for it to come back", f": {goodbye.why}" if goodbye.why else "")
    return goodbye.finished


async def _work(site: Site, stream: Stream, orders: asyncio.Queue[tuple[Order, bytes]], running: RunningOrders) -> None:
    """Carry out orders; of several that wait, only the newest. One that runs when the connection is lost goes on."""
    while True:
        order, body = await orders.get()
        while not orders.empty():
            order, body = orders.get_nowait()
        key = (order.session, *order.place)
        for other, task in list(running.items()):
            if other != key:
                await asyncio.wait({task})
                del running[other]
        if key not in running:
            running[key] = asyncio.create_task(asyncio.to_thread(site.carry_out, order, body))
        reply, reply_body = await asyncio.shield(running[key])
        await write(stream, reply.head(), reply_body)
        running.pop(key, None)
