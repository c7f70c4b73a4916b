"""What a lying site can say about turns, and what others believe: a trainer nothing, an aggregator only what fits what is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_rotation import leaders_of, models, until
from turns_here import Turns, turns

from kilter.net.known_turns import KnownTurns
from kilter.net.rotation import Rotation
from kilter.net.turns import NOBODY, TURN_KINDS, Turn, TurnMessage
from kilter.records.wire import Malformed

__all__ = ["turns"]  # a fixture

NAMES = ("a", "b", "c")


def in_order(round: int) -> tuple[str, ...]:
    first = (round - 1) % 3
    return (*NAMES[first:], *NAMES[:first])


@pytest.fixture
def known() -> KnownTurns:
    return KnownTurns(NOBODY, NAMES, rounds=5, order=in_order)


# What is believed -----------------------------------------------------------------------------------------------------


def test_only_sites_that_aggregate_make_claims_about_rounds_that_exist(known: KnownTurns) -> None:
    known.check("a", Turn(5, 3))
    with pytest.raises(Malformed, match="does not aggregate"):
        known.check("t", Turn(1, 0))
    with pytest.raises(Malformed, match="no round 6"):
        known.check("a", Turn(6, 0))


def test_a_turn_has_one_leader(known: KnownTurns) -> None:
    assert known.observe(Turn(2, 0), "c")
    assert not known.leads("a", Turn(2, 0))  # b, c, a is the order of round 2
    assert not known.observe(Turn(2, 0), "a")
    assert known.leader == "c"
    assert not known.leads("b", Turn(1, 9))
    assert known.leads("a", Turn(2, 1))


def test_if_two_sites_begin_the_same_turn_all_follow_the_first_in_turn() -> None:
    """Whichever they heard of first."""
    for first, second in (("b", "c"), ("c", "b")):
        known = KnownTurns(NOBODY, NAMES, rounds=5, order=in_order)
        known.observe(Turn(2, 0), first)
        known.observe(Turn(2, 0), second)
        assert known.leader == "b"


def test_the_state_before_a_turn_is_where_the_round_before_was_led(known: KnownTurns) -> None:
    assert known.holder(Turn(1, 0)) == ""
    known.observe(Turn(1, 0), "a")
    known.observe(Turn(1, 1), "b")  # a was lost
    assert known.holder(Turn(2, 0)) == "b"
    known.observe(Turn(2, 0), "c")
    assert known.holder(Turn(2, 1)) == "b"
    assert known.holder(Turn(3, 0)) == "c"
    assert known.holder(Turn(5, 0)) == ""  # unknown


# Liars in a run -------------------------------------------------------------------------------------------------------


def say(liar: Rotation, kind: str, turn: Turn, body: bytes = b"") -> None:
    message = TurnMessage(kind, turn)  # type: ignore[arg-type]
    for name in NAMES:
        liar.links.send(name, message.head(), body)


def run_with_a_liar(here: Turns, lie: Callable[[str, str, dict[str, object]], None]) -> None:
    """Run to the end while `lie` sees every letter: the result must be that of the simulator."""
    here.on_letter = lie
    for name in here.ids:
        here.start(name)
    real, simulated = here.wait(), here.simulated()
    one, other = models(real, simulated)
    assert one == other


def test_a_trainer_cannot_take_the_lead_stop_a_leader_or_end_the_run(turns: Callable[..., Turns]) -> None:
    """Before every order it claims every kind of message about the last turn there is, and the present one."""
    here = turns(start=False, rounds=3, roles="c=trainer")
    lied: list[str] = []

    def lie(sender: str, to: str, head: dict[str, object]) -> None:
        liar = here.rotations["c"]
        if head["kind"] == "order" and sender != "c" and len(lied) < 100 and liar.links.present:
            for kind in TURN_KINDS:
                lied.append(kind)
                say(liar, kind, Turn(3, 10**6))
                say(liar, kind, Turn(*head["turn"]))  # type: ignore[misc]
            for name in ("a", "b"):  # an order of its own
                liar.links.send(name, {**head, "turn": [3, 10**6]}, b"")

    run_with_a_liar(here, lie)
    assert lied
    assert {leader for turn, leader in leaders_of(here).items() if turn[1] == 0} == {"a", "b"}
    assert "it does not aggregate in this run" in here.rotations["a"].links.last_error


def test_a_hand_over_comes_from_the_site_that_has_the_state(turns: Callable[..., Turns]) -> None:
    """c hands over round 2 to b while a, which led round 1, is there; and claims to have finished it."""
    here = turns(start=False, rounds=2)
    lied: list[object] = []

    def lie(sender: str, to: str, head: dict[str, object]) -> None:
        if head["kind"] == "order" and sender == "a" and to == "c" and head["round"] == 1 and len(lied) < 3:
            liar = here.rotations["c"]
            for kind in ("books", "hand-over", "finished", "taken", "released", "over", "result"):
                lied.append(kind)
                say(liar, kind, Turn(2, 0) if kind != "over" else Turn(1, 0), b"not a hand-over")

    run_with_a_liar(here, lie)
    assert lied
    assert leaders_of(here)[2, 0] == "b"


def test_a_malformed_order_does_not_move_anybody(turns: Callable[..., Turns]) -> None:
    """Its turn counts only if the order itself can be read."""
    here = turns(start=False, rounds=2)
    here.start("a")
    here.start("b")
    a, b = here.rotations["a"], here.rotations["b"]
    until(lambda: "b" in a.links.present and "a" in b.links.present)
    b.links.send("a", {"kind": "order", "turn": [2, 7]})
    until(lambda: "cannot be used" in a.links.last_error)
    assert a.known.turn == NOBODY
