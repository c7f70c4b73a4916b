"""Letters on a stream: a head (a small JSON object) and a body (bytes in the format of `kilter.records.wire`), cut into frames.

A frame is one gRPC message: `H` and the head, whose `size` announces the body, then as many times `B` and up to CHUNK bytes of
it. A reader refuses a body above its limit as soon as it is announced, and never holds more bytes than have arrived.
What a head may contain is defined in `kilter.net.messages`.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NoReturn

from kilter.errors import Malformed
from kilter.net import LARGEST as LARGEST

ATTEND = "/kilter.Star/Attend"  # the stream of a site
JOB_KEY = "kilter-job"  # metadata of a site's stream at a hub: which run it is for
CHUNK = 2**20  # bytes of body in a frame
LARGEST_HEAD = 2**20  # bytes
OPTIONS: list[tuple[str, int | str]] = [  # of every gRPC channel and server
    ("grpc.max_receive_message_length", CHUNK + 2**16),
    ("grpc.max_send_message_length", CHUNK + 2**16),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),  # otherwise gRPC reads far ahead: ten sites with a large model would need 300 MB more
    ("grpc.http2.lookahead_bytes", 4 << 20),  # at 100 ms round-trip time this still allows 40 MB/s for each stream
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

Head = dict[str, object]
Body = bytes | mmap.mmap
NextFrame = Callable[[], Awaitable[object]]  # the next frame; anything but bytes marks the end of the stream


class Ended(Exception):
    """The stream is over."""


def to_frames(head: Head, body: bytes = b"") -> Iterator[bytes]:
    """Cut a letter into frames."""
    yield b"H" + json.dumps({**head, "size": len(body)}, separators=(",", ":")).encode()
    view = memoryview(body)
    for at in range(0, len(body), CHUNK):
        yield b"".join((b"B", view[at : at + CHUNK]))


def parse_json(data: bytes, what: str) -> Head:
    """A JSON object without NaN or infinity, or `Malformed`."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        value = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Malformed(f"{what} is not JSON") from None
    if not isinstance(value, dict):
        raise Malformed(f"{what} is not a JSON object")
    return value


def parse_head(frame: bytes, largest: int) -> tuple[Head, int]:
    """The head in this frame, and the number of bytes in the body that follows."""
    if frame[:1] != b"H" or len(frame) > LARGEST_HEAD:
        raise Malformed("a letter does not begin with a head")
    head = parse_json(frame[1:], "a letter's head")
    size = head.pop("size", None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise Malformed("a letter does not announce its size")
    if size > largest:
        raise Malformed(f"a letter announces {size} bytes, and the limit is {largest}")
    return head, size


def pack_letter(head: Head, body: bytes = b"") -> bytes:
    """A letter in one piece, for engines that carry single messages: length of the head's frame (4 bytes), the frame, the body."""
    frame = next(to_frames(head, body))
    return len(frame).to_bytes(4, "little") + frame + body


def unpack_letter(letter: bytes, largest: int = LARGEST) -> tuple[Head, bytes]:
    """The head and body of a letter in one piece; `Malformed` if the bytes are not one."""
    length = int.from_bytes(letter[:4], "little")
    head, size = parse_head(letter[4 : 4 + min(length, LARGEST_HEAD + 1)], largest)
    body = letter[4 + length :]
    if size != len(body):
        raise Malformed("a letter's body has another size than announced")
    return head, body


async def read_letter(next_frame: NextFrame, largest: int = LARGEST) -> tuple[Head, bytes]:
    """The next letter of a stream; `Ended` when there is none, `Malformed` if the frames are not a letter."""
    head, size = await read_head(next_frame, largest)
    return head, await read_body(next_frame, size)


async def read_large_letter(next_frame: NextFrame, largest: int = LARGEST) -> tuple[Head, Body]:
    """The same, but a large body goes to a temporary file as it arrives: many streams then need little memory."""
    head, size = await read_head(next_frame, largest)
    if size <= CHUNK:
        return head, await read_body(next_frame, size)
    with tempfile.TemporaryFile() as file:  # it has no name, and is gone with the last reference to its contents
        async for part in _parts(next_frame, size):
            file.write(part)
        file.flush()
        return head, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


async def read_head(next_frame: NextFrame, largest: int) -> tuple[Head, int]:
    """The head of the next letter, and the size of its body, which `read_body` reads."""
    frame = await next_frame()
    if not isinstance(frame, bytes):
        raise Ended
    return parse_head(frame, largest)


async def read_body(next_frame: NextFrame, size: int) -> bytes:
    """The body of this size, after its head."""
    return b"".join([part async for part in _parts(next_frame, size)])


async def _parts(next_frame: NextFrame, left: int) -> AsyncIterator[memoryview]:
    """The parts of a body of this size, as they arrive."""
    while left:
        frame = await next_frame()
        if not isinstance(frame, bytes):
            raise Ended
        if frame[:1] != b"B" or not 1 < len(frame) <= left + 1:
            raise Malformed("a letter's body has another size than announced")
        left -= len(frame) - 1
        yield memoryview(frame)[1:]
