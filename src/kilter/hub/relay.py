"""Passes a site's stream on to the process of its run, and back, frame by frame and without looking inside.

The process listens on a socket that only this user can reach, and believes the names in hellos, because they are checked here: the
name in the certificate, its role, the revocation list, the sites of the run. All sites use the hub's one port.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import grpc
from grpc import aio

from kilter.errors import Malformed
from kilter.net.frames import ATTEND, OPTIONS, parse_head

HELLO_SECONDS = 20.0
START_SECONDS = 30.0  # within which the process of a run opens its socket


class ServerContext(Protocol):
    """What is used of gRPC's context of a stream."""

    async def read(self) -> object: ...
    async def write(self, frame: bytes) -> None: ...
    async def abort(self, code: grpc.StatusCode, details: str) -> None: ...


async def first_message(context: ServerContext) -> bytes:
    """The first message of a stream; empty if none came.

    Read it even if the caller will be refused: one whose message cannot be delivered never learns why it was refused.
    """
    try:
        message = await asyncio.wait_for(context.read(), HELLO_SECONDS)
    except TimeoutError:
        return b""
    return message if isinstance(message, bytes) else b""


def check_hello(frame: bytes, name: str) -> bytes:
    """The first frame of a site's stream, if it is a hello in the name of its certificate; `Malformed` otherwise."""
    if not frame:
        raise Malformed("no hello came")
    head, _ = parse_head(frame, 0)
    if head.get("kind") != "hello":
        raise Malformed("the first message is not a hello")
    if head.get("name") != name:
        raise Malformed(f"its certificate is for '{name}', and its hello for another site")
    return frame


async def relay(first: bytes, context: ServerContext, socket: str, traffic: Counter[str]) -> None:
    """Connect a stream, whose first frame was read, with the process at this socket, until one of them ends."""
    await _until_there(Path(socket))
    async with aio.insecure_channel(f"unix:{socket}", options=OPTIONS) as channel:
        inner = channel.stream_stream(ATTEND)(wait_for_ready=False)
        tasks = [
            asyncio.create_task(_up(first, context, inner, traffic)),
            asyncio.create_task(_down(context, inner, traffic)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if not inner.done():
                inner.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    code, why = await _how_it_ended(inner)
    if code == grpc.StatusCode.UNAVAILABLE:
        why = "the process of the run ended, or is not ready"
    if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
        await context.abort(code, why)


async def _until_there(socket: Path) -> None:
    """Give a process that has just been started some seconds to listen."""
    until = asyncio.get_running_loop().time() + START_SECONDS
    while not socket.exists() and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.05)


async def _how_it_ended(inner: aio.StreamStreamCall) -> tuple[grpc.StatusCode, str]:
    with suppress(asyncio.CancelledError, aio.AioRpcError):
        return await inner.code(), await inner.details() or ""
    return grpc.StatusCode.UNAVAILABLE, "the run's process is not there"


async def _up(first: bytes, context: ServerContext, inner: aio.StreamStreamCall, traffic: Counter[str]) -> None:
    frame: object = first
    while isinstance(frame, bytes):
        await inner.write(frame)
        traffic["in"] += len(frame)
        frame = await context.read()
    await inner.done_writing()
    await asyncio.sleep(5.0)  # the process hangs up when it has read the end


async def _down(context: ServerContext, inner: aio.StreamStreamCall, traffic: Counter[str]) -> None:
    while isinstance(frame := await inner.read(), bytes):
        await context.write(frame)
        traffic["out"] += len(frame)
