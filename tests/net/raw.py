"""Sites made by hand, honest and not: a stream that sends whatever a test wants."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from kilter.core import Tree
from kilter.net.data_description import DataDescription
from kilter.net.frames import OPTIONS, parse_head, to_frames
from kilter.net.grpc_server import ATTEND
from kilter.net.messages import Card, Hello
from kilter.net.tls import Identity
from kilter.records import wire

DESCRIPTION = DataDescription((2,), ("x", "y"))
INSTANCE = "ab" * 16


def hello_head(name: str, **changed: Any) -> dict[str, Any]:
    return {**Hello(name, DESCRIPTION, 100, INSTANCE, Card("")).head(), **changed}


def channel(port: int, identity: Identity | None, **given: Any) -> grpc.Channel:
    """As a site dials; `given` replaces parts of its credentials."""
    me = {"root": identity.ca, "key": identity.key, "cert": identity.cert} | given if identity else given
    credentials = grpc.ssl_channel_credentials(me["root"], me.get("key"), me.get("cert"))
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "server"), ("grpc.enable_retries", 0)]
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)


class Raw:
    """A stream that has sent a hello, or something in its place."""

    def __init__(
        self, port: int, identity: Identity | None, name: str, hello: bytes | None = None, **given: Any
    ) -> None:
        self.name = name
        self._out: queue.Queue[bytes | None] = queue.Queue()
        self._channel = channel(port, identity, **given)
        self._stream = self._channel.stream_stream(ATTEND)(iter(self._out.get, None))
        if hello is None:
            self.send(hello_head(name))
        elif hello:
            self.frame(hello)

    def frame(self, data: bytes) -> None:
        self._out.put(data)

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        for frame in to_frames(head, body):
            self.frame(frame)

    def read(self) -> tuple[dict[str, Any], bytes]:
        head, size = parse_head(next(self._stream), 2**31)
        body = b""
        while len(body) < size:
            body += next(self._stream)[1:]
        return head, body

    def order(self) -> tuple[dict[str, Any], Tree]:
        """The next order."""
        while True:
            head, body = self.read()
            if head["kind"] == "order":
                return head, wire.decode(body)

    def reply(self, order: dict[str, Any], tree: Tree, **changed: Any) -> None:
        self.send({**reply_head(self.name, order), **changed}, letter(tree))

    def refused(self) -> grpc.RpcError:
        """How the stream ended."""
        try:
            while True:
                next(self._stream)
        except grpc.RpcError as e:
            return e
        except StopIteration:
            raise AssertionError("the stream ended in peace") from None

    def close(self) -> None:
        self._out.put(None)
        self._channel.close()


def reply_head(name: str, order: dict[str, Any]) -> dict[str, Any]:
    """The head of an honest reply to this order."""
    place = {k: order[k] for k in ("run", "session", "round", "seq", "step")}
    return {"kind": "reply", "from": name, **place, "state": {"instance": INSTANCE, "generation": 0}}


def letter(tree: Tree) -> bytes:
    return wire.encode({"reply": tree, "fits": [], "seconds": 0.0, "notes": []})


class Honest(Raw):
    """Answers every order with `make(message)`, in a thread."""

    def __init__(self, port: int, identity: Identity, name: str, make: Callable[[Tree], Tree]) -> None:
        super().__init__(port, identity, name)
        self._make = make
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        with suppress(grpc.RpcError, StopIteration, ValueError):
            while True:
                head, message = self.order()
                self.reply(head, self._make(message))
