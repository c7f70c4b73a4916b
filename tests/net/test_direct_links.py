"""Direct links between sites: what waits is bounded, what is lost is counted, and packets are sent again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from place import free_ports
from test_peer_transport import until

from kilter.net import byte_budget, direct_links
from kilter.net.byte_budget import PER_ITEM, ByteBudget
from kilter.net.direct_links import GREET, PACKET, DirectLinks
from kilter.net.frames import OPTIONS, to_frames
from kilter.net.seal import Seal
from kilter.net.turns import Packet, Ready

RUN = "0" * 32
MESSAGE = {"kind": "over", "turn": [1, 0], "sizes": []}


class TwoSites:
    """a and b, with links that can be opened and closed one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip("ab", free_ports(2), strict=True)}
        self.received: list[tuple[str, int]] = []
        self.reading = threading.Event()
        self.reading.set()
        self.links: dict[str, DirectLinks] = {}

    def open(self, name: str) -> DirectLinks:
        place = self.folder / name
        place.mkdir(exist_ok=True, mode=0o700)
        links = DirectLinks(RUN, Seal(name, None, place), self.addresses, self.addresses[name], None)
        links.on_packet = self._receive
        self.links[name] = links
        links.open(lambda: self.ready(name))
        return links

    def _receive(self, sender: str, head: dict[str, Any], body: bytes) -> None:
        self.reading.wait(30)
        self.received.append((sender, len(body)))

    def ready(self, name: str) -> Ready:
        links = self.links[name]
        return Ready(name, links.nonce, 5, "1" * 32, links._seal.card())

    def both(self) -> tuple[DirectLinks, DirectLinks]:
        a, b = self.open("a"), self.open("b")
        until(lambda: "b" in a.present and "a" in b.present)
        return a, b

    def end(self) -> None:
        self.reading.set()
        for links in self.links.values():
            links.close()


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoSites]:
    monkeypatch.setattr(direct_links, "GREETING_SECONDS", 0.1)
    made = TwoSites(tmp_path)
    yield made
    made.end()


def bounded(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let budgets hold this many bytes."""
    monkeypatch.setattr(byte_budget.ByteBudget.__init__, "__defaults__", (most,))


def test_a_budget_holds_one_item_of_any_size_and_else_bounds_bytes_and_items() -> None:
    budget = ByteBudget(10 * PER_ITEM)
    assert [budget.admit("a", 0) for _ in range(11)] == [True] * 10 + [False]
    assert budget.admit("b", 10**9)
    assert not budget.admit("b", 0)
    budget.release("b", 10**9)
    assert budget.is_empty("b")
    assert budget.admit("b", 0)


def test_a_receiver_refuses_what_has_no_room_and_the_sender_sends_it_again(
    sites: TwoSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, 25_000)
    a, b = sites.both()
    a._outbox_budget = ByteBudget(10**9)
    sites.reading.clear()  # b does not read
    for _ in range(5):
        a.send("b", MESSAGE, bytes(10_000))
    until(lambda: b._inbox_budget._waiting["a"] > 20_000)
    assert b._inbox_budget._waiting["a"] <= 25_000
    assert not a.flush()
    sites.reading.set()
    until(lambda: sites.received == [("a", 10_000)] * 5)
    assert a._lost["b"] == 0  # nothing was lost, and the order is kept


def test_a_sender_books_only_its_own_room(sites: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger announces bodies that never come: the room that it booked is free when its calls end."""
    bounded(monkeypatch, 50_000)
    a, b = sites.both()
    packet = Packet(RUN, "a", "b", "2" * 32, 1)
    head = next(iter(to_frames(packet.head(), bytes(40_000))))
    with grpc.insecure_channel(sites.addresses["b"], OPTIONS) as channel:
        call = channel.stream_unary(PACKET)
        pause = threading.Event()

        def half() -> Iterator[bytes]:
            yield head
            pause.wait(30)

        first = call.future(half())
        until(lambda: b._inbox_budget._waiting["a"] > 40_000)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter(to_frames(packet.head(), bytes(40_000))))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        pause.set()
        first.cancel()
    until(lambda: b._inbox_budget.is_empty("a"))
    a.send("b", MESSAGE, bytes(7))
    until(lambda: ("a", 7) in sites.received)


def test_packets_that_do_not_fit_into_the_outbox_count_as_lost(
    sites: TwoSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection then counts as new on both sides, so that what still matters is sent again."""
    a, b = sites.both()
    before = a.connection_to("b"), b.connection_to("a")
    a._outbox_budget, b._inbox_budget = ByteBudget(25_000), ByteBudget(25_000)
    sites.reading.clear()
    for _ in range(9):
        a.send("b", MESSAGE, bytes(10_000))
    sites.reading.set()
    until(lambda: a.connection_to("b") != before[0] and b.connection_to("a") != before[1])
    assert 2 <= len(sites.received) < 9
    assert a._lost["b"] == 1


def test_a_packet_goes_out_again_while_its_receiver_is_there(sites: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a short break of the network: the first attempts fail, the site is there all the time."""
    a, _ = sites.both()
    deliver, failed = a._deliver, []

    class Unreachable(grpc.aio.AioRpcError):
        def __init__(self) -> None:
            super().__init__(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def fail_twice(name: str, packet: Packet, sealed: bytes) -> Any:
        if len(failed) < 2:
            failed.append(name)
            return Unreachable()
        return await deliver(name, packet, sealed)

    monkeypatch.setattr(a, "_deliver", fail_twice)
    a.send("b", MESSAGE, b"again")
    until(lambda: sites.received == [("a", 5)])
    assert failed == ["b", "b"]
    assert a._lost["b"] == 0


def test_a_greeting_counts_the_packets_that_were_lost(sites: TwoSites) -> None:
    a, b = sites.both()
    before = b.connection_to("a")
    assert json.loads(a._greeting("b"))["lost"] == 0
    packet = Packet(RUN, "a", "b", a.nonce, 10**6)
    with a.changed:
        there = a._there.pop("b")  # a believes for a moment that b has left
    a._channels["b"], working = _NoChannel(), a._channels["b"]
    a.post(packet, b"never arrives")
    until(lambda: a._lost["b"] == 1)
    a._channels["b"] = working
    a._there.setdefault("b", there)
    assert json.loads(a._greeting("b"))["lost"] == 1
    until(lambda: b.connection_to("a") != before and b.connection_to("a") is not None)


class _NoChannel:
    """A channel on which every call fails."""

    def stream_unary(self, _: str) -> Any:
        async def call(frames: object) -> bytes:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

        return call

    def unary_unary(self, _: str) -> Any:
        async def call(*_: object, **__: object) -> bytes:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

        return call


def test_a_site_that_claims_losses_in_every_greeting_gets_few_new_connections(
    sites: TwoSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b greets itself in the name of a, 50 times at once."""
    _, b = sites.both()
    monkeypatch.setattr(direct_links, "GREETING_SECONDS", 5.0)
    before = b._connections
    with grpc.insecure_channel(sites.addresses["b"], OPTIONS) as channel:
        for lost in range(50):
            greeting = {**sites.ready("a").head(), "run": RUN, "lost": lost}
            channel.unary_unary(GREET)(json.dumps(greeting).encode())
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            channel.unary_unary(GREET)(json.dumps({**greeting, "lost": "many"}).encode())
    assert b._connections <= before + 1


def test_presence_is_announced_in_the_order_of_events(sites: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first announcement is slow, and must not undo later ones."""
    update = DirectLinks.update

    def slow(links: DirectLinks, present: dict[str, tuple[Ready, int]]) -> None:
        if not present:
            time.sleep(0.3)
        update(links, present)

    monkeypatch.setattr(DirectLinks, "update", slow)
    a, b = sites.both()
    time.sleep(0.5)
    assert set(a.present) == {"b"}
    assert set(b.present) == {"a"}
