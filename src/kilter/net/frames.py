"""Letters on a stream: a head (a small JSON object) and a body (bytes in the format of `kilter.records.wire`), cut into frames.

A frame is one gRPC message: `H` and the head, whose `size` announces the body, then as many times `B` and up to CHUNK bytes of
it. Whoever reads refuses a body larger than its limit when it is announced, and holds no more than what really came.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from kilter.net import LARGEST as LARGEST
from kilter.records.wire import Malformed

CHUNK = 2**20  # bytes of body in a frame
LARGEST_HEAD = 2**20
OPTIONS: list[tuple[str, Any]] = [  # of every channel and server
    ("grpc.max_receive_message_length", CHUNK + 2**16),
    ("grpc.max_send_message_length", CHUNK + 2**16),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
]

Head = dict[str, Any]
Read = Callable[[], Awaitable[Any]]  # the next frame; something that is not bytes at the end of the stream


class Ended(Exception):
    """The stream is over."""


def cut(head: Head, body: bytes = b"") -> Iterator[bytes]:
    """The frames of a letter."""
    yield b"H" + json.dumps({**head, "size": len(body)}, separators=(",", ":")).encode()
    for at in range(0, len(body), CHUNK):
        yield b"B" + body[at : at + CHUNK]


def head_of(frame: bytes, largest: int) -> Head:
    """The head in this frame, checked as far as everyone needs it."""
    if frame[:1] != b"H" or len(frame) > LARGEST_HEAD:
        raise Malformed("a letter does not begin with a head")
    try:
        head = json.loads(frame[1:])
    except (ValueError, RecursionError):
        raise Malformed("a letter's head is not JSON") from None
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise Malformed("a letter's head is of no kind")
    size = head.get("size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise Malformed("a letter's size is not announced")
    if size > largest:
        raise Malformed(f"a letter of {size} bytes is announced, and at most {largest} are taken")
    return head


def together(head: Head, body: bytes = b"") -> bytes:
    """A letter in one piece, for an engine that carries pieces: how long the head's frame is (4 bytes), that frame, the body."""
    frame = next(cut(head, body))
    return len(frame).to_bytes(4, "little") + frame + body


def apart(letter: bytes, largest: int = LARGEST) -> tuple[Head, bytes]:
    """The head and body of a letter in one piece; `Malformed` if it is not one of ours."""
    length = int.from_bytes(letter[:4], "little")
    head = head_of(letter[4 : 4 + min(length, LARGEST_HEAD + 1)], largest)
    body = letter[4 + length :]
    if head["size"] != len(body):
        raise Malformed("a letter's body is not as announced")
    return head, body


async def read(next_frame: Read, largest: int = LARGEST) -> tuple[Head, bytes]:
    """The next letter of a stream; `Ended` when there is none, `Malformed` if it is not one of ours."""
    frame = await next_frame()
    if not isinstance(frame, bytes):
        raise Ended
    head = head_of(frame, largest)
    left, parts = head["size"], []
    while left:
        frame = await next_frame()
        if not isinstance(frame, bytes):
            raise Ended
        if frame[:1] != b"B" or not 1 < len(frame) <= left + 1:
            raise Malformed("a letter's body is not as announced")
        parts.append(memoryview(frame)[1:])
        left -= len(frame) - 1
    return head, b"".join(parts)


def text(head: Head, key: str, longest: int = 200) -> str:
    """A word of the head."""
    value = head.get(key)
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise Malformed(f"a letter's {key} is not a short text")
    return value


def place(head: Head) -> tuple[int, int]:
    """(round, call within the round) of an order or a reply."""
    found = head.get("round"), head.get("seq")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in found):
        raise Malformed("a letter's round is not a number")
    return found  # type: ignore[return-value]
