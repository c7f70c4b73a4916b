"""Calls to a hub: submit, list, cancel, logs, fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import grpc
import msgspec

from kilter.errors import Malformed, Mistake
from kilter.hub.messages import (
    CALL,
    FETCH,
    LOGS,
    Answer,
    CancelRequest,
    FetchRequest,
    FilePart,
    JobRequest,
    JobView,
    ListRequest,
    LogRequest,
    SubmitRequest,
    decode,
    encode,
)
from kilter.net.frames import OPTIONS
from kilter.net.names import printable
from kilter.net.ports import check_server_address
from kilter.net.tls import Identity

SECONDS = 150.0  # for a call; checking a submission starts a process at the hub


class HubClient:
    """A connection to a hub."""

    def __init__(self, address: str, identity: Identity, hub_name: str = "server") -> None:
        self.address = check_server_address(address)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", hub_name)]
        self._channel = grpc.secure_channel(address, identity.for_client(), options)

    def close(self) -> None:
        self._channel.close()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Errors of the connection, in one sentence."""
        try:
            yield
        except grpc.RpcError as e:
            why = printable((e.details() or e.code().name).splitlines()[0])
            if e.code() == grpc.StatusCode.NOT_FOUND:
                raise Mistake(why) from None
            if e.code() == grpc.StatusCode.PERMISSION_DENIED:
                raise Mistake(f"The hub refuses this certificate: {why}.") from None
            raise Mistake(f"The hub '{self.address}' does not answer: {why}.") from None

    def _call(self, request: msgspec.Struct) -> list[JobView]:
        with self._reached():
            data = self._channel.unary_unary(CALL)(encode(request), timeout=SECONDS)
        answer = decode(data, Answer)
        if answer.refused:
            raise Mistake(answer.refused)
        return answer.jobs

    def submit(self, request: SubmitRequest) -> JobView:
        return self._call(request)[0]

    def jobs(self, most: int = 1000) -> list[JobView]:
        """Jobs that I may see, newest first."""
        return self._call(ListRequest(most))

    def job(self, number: int) -> list[JobView]:
        """A job, then the runs of a study."""
        return self._call(JobRequest(number))

    def cancel(self, number: int) -> JobView:
        return self._call(CancelRequest(number))[0]

    def logs(self, number: int, follow: bool) -> Iterator[bytes]:
        """The log of a job in pieces."""
        with self._reached():
            yield from self._channel.unary_stream(LOGS)(encode(LogRequest(number, follow)))

    def fetch(self, number: int, folder: Path, show: Callable[[str], None] = lambda path: None) -> int:
        """Copy the files of a run or study into a folder; how many."""
        count = 0
        with self._reached():
            parts = iter(self._channel.unary_stream(FETCH)(encode(FetchRequest(number))))
            for part in parts:
                if part[:1] != b"F":
                    raise Malformed("The hub sent a file without a name.")
                file = decode(part[1:], FilePart)
                path = inside(folder, file.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(path.name + ".new")
                with open(new, "wb") as out:
                    _receive(parts, out, file.size)
                new.replace(path)
                show(file.path)
                count += 1
        return count


def inside(folder: Path, relative: str) -> Path:
    """A path below a folder; a Mistake if the name would lead out of it."""
    parts = PurePosixPath(relative).parts
    if not parts or relative.startswith("/") or any(part in ("..", "") or "\\" in part for part in parts):
        raise Mistake(f"The hub sent a file with an impossible name: '{printable(relative, 80)}'.")
    return folder.joinpath(*parts)


def _receive(parts: Iterator[bytes], out: BinaryIO, size: int) -> None:
    while size > 0:
        part = next(parts, b"")
        if part[:1] != b"B" or not 1 < len(part) <= size + 1:
            raise Malformed("The hub sent another number of bytes than it announced.")
        out.write(part[1:])
        size -= len(part) - 1
