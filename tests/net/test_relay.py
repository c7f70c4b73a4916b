"""The relay of sites that aggregate in turn: who may report, and what waits for a slow receiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kilter.net.byte_budget import ByteBudget
from kilter.net.messages import Card, Goodbye
from kilter.net.relay import PROTOCOL, Relay
from kilter.net.transport import ConnectedSite, Transport
from kilter.net.turns import Packet, Ready

RUN, NONCE = "0" * 32, "1" * 32


@dataclass
class SmallHello:
    name: str
    protocol: int = PROTOCOL


class SlowTransport(Transport):
    """Sites that read only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.budget = ByteBudget(10_000)
        self.sites = {name: ConnectedSite(SmallHello(name)) for name in "abt"}  # type: ignore[arg-type]

    def send(self, name: str, head: dict[str, Any], body: bytes) -> None:
        self.sent.append((name, head))

    def forward(self, name: str, sender: str, head: dict[str, Any], body: bytes) -> bool:
        if not self.budget.admit(sender, len(body)):
            return False
        self.send(name, head, body)
        return True

    def has_room(self, name: str, sender: str) -> bool:
        return self.budget.is_empty(sender)

    def drop(self, name: str, why: str) -> None:
        raise AssertionError(why)

    def close(self, goodbye: Goodbye | None = None) -> None:
        pass


@pytest.fixture
def relay() -> Relay:
    made = Relay(SlowTransport(), RUN, ("a", "b", "t"), ("a", "b"), lambda name: {"kind": "terms"})
    made._transport.changed.acquire()  # the relay expects its caller to hold it
    for name in "abt":
        assert made._on_message(name, Ready(name, NONCE, 5, NONCE, Card("00" * 32)).head(), b"") is None
    made._announce()
    return made


def numbers(relay: Relay) -> dict[str, int]:
    """The connections that sites were last told of."""
    sent = relay._transport.sent  # type: ignore[attr-defined]
    last = [head for to, head in sent if to == "a" and head["kind"] == "presence"][-1]
    return {name: entry["connection"] for name, entry in last["sites"].items()}


def test_only_sites_that_aggregate_report(relay: Relay) -> None:
    refused = relay._on_message("t", {"kind": "result"}, b"{}")
    assert refused is not None
    assert "does not aggregate" in refused
    assert relay._summary is None


def test_packets_that_a_slow_receiver_has_no_room_for_are_sent_again_later(relay: Relay) -> None:
    transport: Any = relay._transport
    before = numbers(relay)
    for k in range(3):
        assert relay._on_message("a", Packet(RUN, "a", "b", NONCE, k).head(), bytes(6000)) is None
    forwarded = [head["number"] for to, head in transport.sent if head["kind"] == "packet"]
    assert forwarded == [0]
    assert "b reads too slowly" in transport.last_error
    relay._announce()
    assert numbers(relay) == before  # it would be too slow again
    transport.budget.release("a", 6000)
    relay._announce()
    after = numbers(relay)
    assert after["b"] > before["b"]
    assert {name: n for name, n in after.items() if name != "b"} == {
        name: n for name, n in before.items() if name != "b"
    }
