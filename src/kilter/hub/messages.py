"""Everything that a hub, its agents and submitters send each other. Whatever arrives is decoded into these types, or refused.

Hub and agent exchange whole states, not changes: the hub says which runs an agent should take part in, the agent says how each
of them is. After a lost connection or a crash of either side, one message each way is all it takes to agree again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kilter import __version__
from kilter.errors import Malformed
from kilter.net.names import printable

PROTOCOLS = (1, 1)  # oldest and newest version of these messages that this release understands
MOST_JOBS = 10_000
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, Meta(max_length=400)]
JobId = Annotated[int, Meta(ge=1, le=2**53)]
JobIds = Annotated[list[JobId], Meta(max_length=MOST_JOBS)]
SiteState = Literal["starting", "running", "pending", "refused", "failing", "finished"]
State = Literal["queued", "waiting", "running", "finished", "failed", "cancelled"]

AGENT, CALL = "/kilter.Hub/Agent", "/kilter.Hub/Call"
LOGS, FETCH = "/kilter.Hub/Logs", "/kilter.Hub/Fetch"


# Agent and hub ----------------------------------------------------------------------------------------------------------


class AgentHello(msgspec.Struct, frozen=True, tag="hello"):
    """An agent introduces itself."""

    name: Name
    parallel: Annotated[int, Meta(ge=1, le=1000)]  # runs at the same time
    protocols: tuple[int, int] = PROTOCOLS
    release: Annotated[str, Meta(max_length=64)] = __version__


class SiteReport(msgspec.Struct, frozen=True):
    """How a run is at one site."""

    job: JobId
    state: SiteState
    why: Text = ""


class AgentReport(msgspec.Struct, frozen=True, tag="report"):
    """How all runs of an agent are."""

    runs: Annotated[list[SiteReport], Meta(max_length=MOST_JOBS)] = []


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """The runs that an agent should take part in, and those that wait: what the agent knows about them still matters."""

    run: JobIds
    hold: JobIds
    protocol: int = PROTOCOLS[1]


# Submitters and hub -----------------------------------------------------------------------------------------------------


class SubmitRequest(msgspec.Struct, frozen=True, tag="submit"):
    """Queue an experiment or a study."""

    text: Annotated[str, Meta(max_length=1_000_000)]  # of the TOML file
    name: Annotated[str, Meta(max_length=80)]
    sites: Annotated[list[Name], Meta(max_length=10_000)] = []  # empty: all sites of the hub
    quorum: Annotated[int, Meta(ge=0, le=10_000)] = 0
    data: Annotated[str, Meta(max_length=200)] = ""  # the hub's data by name; empty: as the experiment says; or none
    deadline: Annotated[float, Meta(gt=0, le=1e7)] = 600.0
    grace: Annotated[float, Meta(ge=0, le=1e7)] = 30.0
    preset: Annotated[str, Meta(max_length=80)] = ""  # of a study


class ListRequest(msgspec.Struct, frozen=True, tag="list"):
    """List jobs, newest first."""

    most: Annotated[int, Meta(ge=1, le=MOST_JOBS)] = 1000


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    job: JobId


class JobRequest(msgspec.Struct, frozen=True, tag="job"):
    """Everything about one job."""

    job: JobId


class LogRequest(msgspec.Struct, frozen=True):
    job: JobId
    follow: bool = False


class FetchRequest(msgspec.Struct, frozen=True):
    job: JobId


class JobView(msgspec.Struct, frozen=True):
    """A job as those who may see it see it."""

    job: int
    name: str
    kind: str
    owner: str
    state: State
    reason: str
    sites: list[str]
    quorum: int
    submitted: str
    started: str
    ended: str
    rounds: int = 0  # finished; of a study, runs
    of_rounds: int = 0
    parent: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The hub's answer: jobs, or why it refuses."""

    jobs: list[JobView] = []
    refused: str = ""


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    """A file begins; `size` bytes follow."""

    path: Annotated[str, Meta(max_length=1000)]
    size: Annotated[int, Meta(ge=0)]


Request = SubmitRequest | ListRequest | CancelRequest | JobRequest
FromAgent = AgentHello | AgentReport
Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(f"a message cannot be read: {printable(str(e), 150)}") from None


def decode(data: object, kind: type[Message]) -> Message:
    """A message of this type, or `Malformed`. Fields that a newer release added are ignored."""
    with _readable():
        return msgspec.json.decode(data if isinstance(data, bytes) else b"", type=kind)


def decode_request(data: object) -> Request:
    """What a submitter or observer asks for, or `Malformed`."""
    with _readable():
        return msgspec.json.decode(data if isinstance(data, bytes) else b"", type=Request)


def decode_from_agent(data: object) -> FromAgent:
    """What an agent says, or `Malformed`."""
    with _readable():
        return msgspec.json.decode(data if isinstance(data, bytes) else b"", type=FromAgent)


def common_protocol(theirs: tuple[int, int]) -> int:
    """The newest version that both sides understand; `Malformed` says which side to update."""
    newest = min(PROTOCOLS[1], theirs[1])
    if newest < PROTOCOLS[0]:
        raise Malformed(f"the agent is too old for this hub ({__version__}): update kilter at the site")
    if newest < theirs[0]:
        raise Malformed(f"this hub ({__version__}) is too old for the agent: update kilter at the hub")
    return newest
