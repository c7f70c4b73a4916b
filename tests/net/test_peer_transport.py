"""Peers talking to each other on loopback: letters sent again, strangers turned away, bounded boxes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("grpc")

from place import free_ports

from kilter.errors import Mistake
from kilter.net.messages import PeerLetter
from kilter.net.peer_transport import AHEAD, PeerTransport
from kilter.runtimes.step_names import StepName

NAMES = ("a", "b", "c")


@pytest.fixture
def peers() -> Iterator[dict[str, PeerTransport]]:
    ports = dict(zip(NAMES, free_ports(3), strict=True))
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    made = {name: PeerTransport(name, addresses, addresses[name], "run", None) for name in NAMES}
    for peer in made.values():
        peer.enter(1)
    yield made
    for peer in made.values():
        peer.close()


def write(
    peer: PeerTransport,
    to: str,
    body: bytes = b"x",
    at: tuple[int, int] = (1, 1),
    sender: str = "",
    gave_up: tuple[str, ...] = (),
) -> None:
    letter = PeerLetter(peer.run, sender or peer.me, to, *at, StepName("train"), False, gave_up)
    peer.send(at, {to: (letter, body)})


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def test_what_a_peer_says_about_a_third_makes_nobody_drop_it(peers: dict[str, PeerTransport]) -> None:
    """Finding 5: one peer could make others drop a third."""
    a, b = peers["a"], peers["b"]
    write(a, "b", gave_up=("c",))
    until(lambda: ((1, 1), "a") in b.inbox)
    assert b.gone == {}


def test_a_peer_that_reads_that_it_was_given_up_knows_it_was_missed(peers: dict[str, PeerTransport]) -> None:
    a, b = peers["a"], peers["b"]
    write(a, "b", gave_up=("b", "stranger"))
    until(lambda: ((1, 1), "a") in b.inbox)
    assert b.gone == {}
    assert b.missed


def test_a_sender_can_only_fill_a_bounded_box(peers: dict[str, PeerTransport]) -> None:
    """Finding 5: letters for the next round had no limit."""
    a, b, c = (peers[name] for name in NAMES)
    for seq in range(1, AHEAD + 20):
        write(a, "b", at=(2, seq))
    until(lambda: len(b.inbox) == AHEAD)
    time.sleep(0.3)
    assert len(b.inbox) == AHEAD
    write(c, "b")  # others are not affected
    until(lambda: ((1, 1), "c") in b.inbox)
    b.largest = 100
    b.inbox.clear()
    write(c, "b", b"x" * 80, at=(2, 1))
    until(lambda: ((2, 1), "c") in b.inbox)
    write(c, "b", b"x" * 80, at=(2, 2))
    time.sleep(0.3)
    assert ((2, 2), "c") not in b.inbox


def test_one_who_comes_back_is_told_that_it_was_missed_and_where_the_others_are(
    peers: dict[str, PeerTransport],
) -> None:
    a, b, c = (peers[name] for name in NAMES)
    for peer in (a, b):
        peer.enter(4)
        peer.gone["c"] = 2
    assert c.greet(2) == {"a": 4, "b": 4}
    assert c.missed
    assert a.gone == b.gone == {}


def test_letters_of_this_round_are_sent_again_to_one_who_asks(peers: dict[str, PeerTransport]) -> None:
    a, b = peers["a"], peers["b"]
    write(a, "b", b"first")
    until(lambda: ((1, 1), "a") in b.inbox)
    b.inbox.clear()  # lost in a crash
    b.greet(1)
    until(lambda: ((1, 1), "a") in b.inbox)
    assert b.inbox[(1, 1), "a"][1] == b"first"


def test_the_first_letter_of_a_place_counts(peers: dict[str, PeerTransport]) -> None:
    a, b = peers["a"], peers["b"]
    write(a, "b", b"first")
    until(lambda: ((1, 1), "a") in b.inbox)
    write(a, "b", b"second thoughts")
    until(lambda: b.traffic["in"] >= len(b"first") + len(b"second thoughts"))
    assert b.inbox[(1, 1), "a"][1] == b"first"


def test_a_letter_from_two_rounds_ahead_waits_with_its_sender(peers: dict[str, PeerTransport]) -> None:
    a, b = peers["a"], peers["b"]
    a.enter(3)
    write(a, "b", at=(3, 1))
    until(lambda: b.rounds.get("a") == 3)
    assert not b.inbox
    b.enter(2)
    until(lambda: ((3, 1), "a") in b.inbox)


def test_a_peer_of_another_run_and_one_signing_for_another_are_refused(peers: dict[str, PeerTransport]) -> None:
    a, b = peers["a"], peers["b"]
    a.run = "another"
    with pytest.raises(Mistake, match="another run"):
        a.greet(1)
    write(a, "b")
    until(lambda: "another run" in b.last_error)
    a.run = "run"
    write(a, "b", sender="stranger")
    until(lambda: "not one of the peers" in b.last_error)
    assert not b.inbox
