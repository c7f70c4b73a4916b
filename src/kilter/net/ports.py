"""Opening a port, for servers, peers and metrics; and the thread in which gRPC's event loop runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

import grpc
from grpc import aio

from kilter.errors import Mistake
from kilter.net.frames import OPTIONS
from kilter.net.tls import Identity

T = TypeVar("T")


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT, or a Mistake.

    >>> split_address("127.0.0.1:9443")
    ('127.0.0.1', 9443)
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise Mistake(f"'{address}' is not an address: write HOST:PORT.")
    return host or "127.0.0.1", int(port)


def check_server_address(address: str) -> str:
    """The address of a server to dial, HOST:PORT or unix:PATH; a Mistake otherwise."""
    if not address.startswith("unix:") and split_address(address)[1] == 0:
        raise Mistake(f"'{address}' is not the address of a server: write HOST:PORT.")
    return address


def cannot_listen(address: str, why: str = "") -> Mistake:
    return Mistake(
        f"Cannot listen on '{address}': {why or 'is the port taken, or does the key not fit the certificate?'}"
    )


async def open_port(
    handlers: dict[str, grpc.RpcMethodHandler], listen: str, identity: Identity | None, most_calls: int
) -> tuple[aio.Server, int]:
    """A gRPC server on this address, and its port. Without an identity it does not use TLS."""
    if not listen.startswith("unix:"):
        split_address(listen)
    server = aio.server(options=OPTIONS, maximum_concurrent_rpcs=most_calls)
    server.add_generic_rpc_handlers((_Service(handlers),))
    try:
        port = server.add_secure_port(listen, identity.for_server()) if identity else server.add_insecure_port(listen)
    except (RuntimeError, ValueError):
        port = 0
    if not port:
        raise cannot_listen(listen)
    await server.start()
    return server, port


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers = handlers

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(call.method)


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, T], seconds: float | None = None) -> T:
        """Run a coroutine there, from another thread, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
