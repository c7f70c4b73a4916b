"""Post offices talking to each other on loopback: gossip of who is gone, letters sent again, strangers turned away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("grpc")

from place import free_ports

from kilter.errors import Mistake
from kilter.net.peer_transport import Office

NAMES = ("a", "b", "c")


@pytest.fixture
def offices() -> Iterator[dict[str, Office]]:
    ports = dict(zip(NAMES, free_ports(3), strict=True))
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    made = {name: Office(name, addresses, addresses[name], "run", None) for name in NAMES}
    for office in made.values():
        office.enter(1)
    yield made
    for office in made.values():
        office.close()


def write(office: Office, to: str, body: bytes = b"x", at: tuple[int, int] = (1, 1), **more: object) -> None:
    head = {"kind": "letter", "run": office.run, "from": office.me, "to": to, "step": "train"}
    office.send(at, {to: ({**head, "round": at[0], "seq": at[1], "empty": False, **more}, body)})


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def test_who_is_gone_is_told_on_with_every_letter(offices: dict[str, Office]) -> None:
    a, b = offices["a"], offices["b"]
    a.gone["c"] = 1
    write(a, "b")
    until(lambda: ((1, 1), "a") in b.inbox)
    assert b.gone == {"c": 1}


def test_hearsay_does_not_count_against_what_one_has_heard_oneself(offices: dict[str, Office]) -> None:
    a, b, c = (offices[name] for name in NAMES)
    write(c, "b")  # b hears from c in round 1
    until(lambda: ((1, 1), "c") in b.inbox)
    a.gone["c"] = 1
    write(a, "b")
    until(lambda: ((1, 1), "a") in b.inbox)
    assert "c" not in b.gone
    a.gone["c"] = 2  # news of a later round than b knows of
    write(a, "b", at=(1, 2))
    until(lambda: ((1, 2), "a") in b.inbox)
    assert b.gone == {"c": 2}


def test_one_who_reads_that_it_was_given_up_knows_it_was_missed(offices: dict[str, Office]) -> None:
    a, b = offices["a"], offices["b"]
    a.gone |= {"b": 5, "stranger": 5}
    write(a, "b")
    until(lambda: ((1, 1), "a") in b.inbox)
    assert b.gone == {}
    assert b.missed


def test_one_who_comes_back_is_told_that_it_was_missed_and_where_the_others_are(offices: dict[str, Office]) -> None:
    a, b, c = (offices[name] for name in NAMES)
    for office in (a, b):
        office.enter(4)
        office.gone["c"] = 2
    assert c.greet(2) == {"a": 4, "b": 4}
    assert c.missed
    assert a.gone == b.gone == {}


def test_letters_of_this_round_are_sent_again_to_one_who_asks(offices: dict[str, Office]) -> None:
    a, b = offices["a"], offices["b"]
    write(a, "b", b"first")
    until(lambda: ((1, 1), "a") in b.inbox)
    b.inbox.clear()  # lost in a crash
    b.greet(1)
    until(lambda: ((1, 1), "a") in b.inbox)
    assert b.inbox[(1, 1), "a"][1] == b"first"


def test_the_first_letter_of_a_place_counts(offices: dict[str, Office]) -> None:
    a, b = offices["a"], offices["b"]
    write(a, "b", b"first")
    until(lambda: ((1, 1), "a") in b.inbox)
    write(a, "b", b"second thoughts")
    until(lambda: b.traffic["in"] >= len(b"first") + len(b"second thoughts"))
    assert b.inbox[(1, 1), "a"][1] == b"first"


def test_a_letter_from_two_rounds_ahead_waits_with_its_sender(offices: dict[str, Office]) -> None:
    a, b = offices["a"], offices["b"]
    a.enter(3)
    write(a, "b", at=(3, 1))
    until(lambda: b.rounds.get("a") == 3)
    assert not b.inbox
    b.enter(2)
    until(lambda: ((3, 1), "a") in b.inbox)


def test_a_peer_of_another_run_and_one_signing_for_another_are_refused(offices: dict[str, Office]) -> None:
    a, b = offices["a"], offices["b"]
    a.run = "another"
    with pytest.raises(Mistake, match="another run"):
        a.greet(1)
    write(a, "b")
    until(lambda: "another run" in b.last_error)
    a.run = "run"
    write(a, "b", to_whom=1, **{"from": "stranger"})
    until(lambda: "not one of the peers" in b.last_error)
    assert not b.inbox
