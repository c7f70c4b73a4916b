"""Sites that aggregate in turn: the numbers and bytes of the simulation, whoever is lost; and nobody else reads the replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from place import Place
from told import booked, simulate, told
from turns_here import LENIENT, WAIT, Turns, turns

from kilter.methods import methods
from kilter.net.aggregator import REPEATED, AggregatorRuntime, LinkTransport
from kilter.net.audit import verify
from kilter.net.disclosure import explain
from kilter.net.frames import pack_letter
from kilter.net.links import OVERHEAD
from kilter.net.terms import Terms
from kilter.net.turns import Waits
from kilter.records.run_folder import read_summary
from kilter.records.wire import Malformed
from kilter.runtimes.ledger import Ledger

__all__ = ["turns"]  # a fixture

QUICK = ("fedavg", "fedep", "fedpdc", "fedsbme", "scaffold")  # the others are slow only because there are many
POOLING = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, method in methods().items()
    if "everyone" not in method.needs
]


def models(*folders: Path) -> list[bytes]:
    return [(folder / "model.safetensors").read_bytes() for folder in folders]


@pytest.mark.parametrize("name", POOLING)
def test_every_pooling_method_gives_the_numbers_of_the_simulation(name: str, turns: Callable[..., Turns]) -> None:
    here = turns(method=name)
    real, simulated = here.wait(), here.simulated()
    assert booked(real) == booked(simulated)
    assert told(real) == told(simulated)
    if (simulated / "model.safetensors").exists():
        one, other = models(real, simulated)
        assert one == other


def test_through_a_relay_the_numbers_are_those_of_the_simulation(place: Callable[..., Place]) -> None:
    """Real processes over gRPC."""
    here = place(method="scaffold", topology="rotating", rounds=4)
    server = here.serve()
    sites = here.all()
    server.wait()
    for site in sites:
        site.wait()
    (summary,) = here.folder.glob("state-*/rotation/*/turn-*/summary.json")
    simulated, real = simulate(here, bench=None), summary.parent
    assert booked(real) == booked(simulated) == booked(here.folder / "run")
    assert told(real) == told(simulated)
    assert told(here.folder / "run") == {}  # the relay learns means over sites only
    one, other = models(real, simulated)
    assert one == other
    assert here.summary()["rounds"] == 4


def test_over_direct_links_the_numbers_are_those_of_the_simulation(place: Callable[..., Place]) -> None:
    """Real processes without a relay. Every site has the records; the models are where `kilter join` puts them."""
    here = place(method="scaffold", topology="rotating", rounds=4)
    for peer in here.peers().values():
        peer.wait()
    simulated = simulate(here, bench=None)
    (summary,) = here.folder.glob("run-*/site/rotation/turn-*/summary.json")
    assert told(summary.parent) == told(simulated)
    for site in here.sites:
        assert booked(here.folder / f"run-{site}") == booked(simulated)
        (model,) = here.folder.glob(f"run-{site}/site/models/*/model.safetensors")
        assert model.read_bytes() == (simulated / "model.safetensors").read_bytes()


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bookings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, bool]]:
    """Every letter that a ledger of this process books: sender, receiver, bytes, whether it is for training."""
    letters: list[tuple[str, str, int, bool]] = []
    book = Ledger.letter

    def letter(ledger: Ledger, sender: str, receiver: str, size: int, training: bool = True) -> None:
        letters.append((sender, receiver, size, training))
        book(ledger, sender, receiver, size, training)

    monkeypatch.setattr(Ledger, "letter", letter)
    return letters


def test_the_ledger_books_the_bytes_of_a_hand_over_as_they_go_over_the_wire(
    turns: Callable[..., Turns], bookings: list[tuple[str, str, int, bool]]
) -> None:
    """FedEP's aggregator remembers summaries of the sites, so the hand-over is more than the model."""
    here = turns(method="fedep")
    here.wait()
    real = list(bookings)
    bookings.clear()
    here.simulated()
    handed = [(sender, to, head["sizes"], n) for sender, to, head, n in here.letters if head["kind"] == "hand-over"]
    assert [(sender, to) for sender, to, _, _ in handed] == [("a", "b"), ("b", "c")]
    for sender, to, (state, memory, best), size in handed:
        assert min(state, memory, best) > 500
        assert state + memory + best == size  # nothing else is in the body
        for books in (real, bookings):
            assert (sender, to, state + memory, True) in books
            assert (sender, to, best, False) in books
    packets = {(p.sender, p.to, len(sealed)) for p, sealed in here.packets}
    heads = [(s, t, h, n) for s, t, h, n in here.letters if h["kind"] == "hand-over"]
    for sender, to, head, size in heads:
        assert (sender, to, len(pack_letter(head)) + len(str(size)) - 1 + size + OVERHEAD) in packets


# Who can read ---------------------------------------------------------------------------------------------------------


def test_only_the_aggregator_can_read_replies_and_hand_overs(turns: Callable[..., Turns]) -> None:
    here = turns(rounds=2)
    here.wait()
    for _, sealed in here.packets:
        assert b"__metadata__" not in sealed  # how every letter of the wire format begins
        assert b"kind" not in sealed
    replies = [(p, sealed) for p, sealed in here.packets if p.sender == "c" and p.to == "a"]
    opened: list[object] = []
    other, receiver = here.rotations["b"].links, here.rotations["a"].links
    other.on_packet = receiver.on_packet = lambda *message: opened.append(message)
    with other.changed:
        other.present["c"] = receiver.present["c"]
    packet, sealed = replies[0]
    other.receive(replace(packet, to="b"), sealed)  # the relay delivers it to another site
    receiver.receive(packet, sealed)  # the relay delivers it once more
    receiver.receive(replace(packet, number=10**6), sealed)
    receiver.receive(replace(packet, sender="b", nonce=other.nonce), sealed)
    receiver.receive(replace(packet, number=10**6), bytes([sealed[0] ^ 1]) + sealed[1:])
    assert opened == []
    assert "altered, replayed or misdelivered" in receiver.last_error


def test_a_site_audits_every_hand_over(turns: Callable[..., Turns]) -> None:
    here = turns()
    here.wait()
    entries = [e for e in verify(here.folder / "state-a/audit.jsonl") if e.event == "hand-over"]
    assert [(e.step, e.to, e.round) for e in entries] == [("books", "b", 2), ("hand-over", "b", 2)]
    (sent,) = [n for sender, _, head, n in here.letters if head["kind"] == "hand-over" and sender == "a"]
    assert entries[1].bytes == sent
    replies = [e for e in verify(here.folder / "state-c/audit.jsonl") if e.step == "train"]
    assert [e.to for e in replies] == ["a", "b", "c"]  # the aggregators, not the relay


# Who is lost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "fedep"])
def test_if_the_aggregator_dies_a_successor_repeats_the_round(name: str, turns: Callable[..., Turns]) -> None:
    """b leads round 2 and dies when its members have trained; c repeats the round, and b comes back as a member."""
    here = turns(start=False, method=name, rounds=4)
    at_first_order(here, 2, here.kill, step=":evaluate")
    until(lambda: here.rotations["c"].position.turn >= (2, 1))
    here.restart("b")
    real, simulated = here.wait(), here.simulated()
    leaders = leaders_of(here)
    assert leaders[2, 0] == "b"
    assert leaders[2, 1] == "c"
    one, other = models(real, simulated)
    assert one == other
    assert [notice.what for notice in read_summary(real).notices] == [REPEATED]


def at_first_order(here: Turns, round: int, act: Callable[[str], None], step: str = "") -> None:
    """Start all sites. At the first order of this round (and step), call `act` with the name of the leader."""
    happened = threading.Event()

    def watch(sender: str, to: str, head: dict[str, Any]) -> None:
        if head["kind"] == "order" and head["round"] == round and step in head["step"] and not happened.is_set():
            happened.set()
            act(sender)

    here.on_letter = watch
    for site in here.ids:
        here.start(site)
    assert happened.wait(30)


def leaders_of(here: Turns) -> dict[tuple[int, int], str]:
    """Who led each turn."""
    return {tuple(head["turn"]): sender for sender, _, head, _ in here.letters if head["kind"] == "order"}


def until(happened: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_turns_skip_sites_that_are_absent_or_do_not_aggregate(turns: Callable[..., Turns]) -> None:
    refuses = replace(LENIENT, aggregate=False)
    here = turns(start=False, rounds=4, policies={"b": refuses}, waits=Waits(quorum=2, grace=0.3))
    for site in ("a", "b"):
        here.start(site)
    until(lambda: "a" in {sender for sender, _, head, _ in here.letters if head.get("round") == 3})
    here.start("c")
    here.wait()
    leaders = [sender for sender, _, head, _ in here.letters if head["kind"] == "order"]
    assert "b" not in leaders


def test_a_leader_that_was_given_up_steps_down(turns: Callable[..., Turns]) -> None:
    """b is cut off while it leads round 2. c takes over; b comes back in the middle of its round and follows."""
    here = turns(start=False, method="scaffold", rounds=4)
    at_first_order(here, 2, here.cut_off)
    until(lambda: here.rotations["c"].position.turn >= (2, 1))
    here.connect("b")
    real, simulated = here.wait(), here.simulated()
    one, other = models(real, simulated)
    assert one == other


def test_a_restart_within_the_grace_changes_nothing(turns: Callable[..., Turns]) -> None:
    """The leader, a member and the holder of the last round, each killed and started again."""
    here = turns(start=False, method="scaffold", rounds=3, waits=Waits(grace=30.0))
    killed: list[str] = []

    def watch(sender: str, to: str, head: dict[str, Any]) -> None:
        if head["kind"] == "order" and head["round"] == 2 and len(killed) < 3 and sender == "b":
            victim = ("b", "a", "c")[len(killed)]
            killed.append(victim)
            here.kill(victim)
            threading.Thread(target=here.restart, args=(victim,), daemon=True).start()

    here.on_letter = watch
    for site in here.ids:
        here.start(site)
    until(lambda: len(killed) == 3)
    real, simulated = here.wait(), here.simulated()
    assert booked(real) == booked(simulated)
    assert told(real) == told(simulated)
    one, other = models(real, simulated)
    assert one == other


def test_if_the_first_leader_dies_another_begins_again(turns: Callable[..., Turns]) -> None:
    here = turns(start=False, method="fedep", rounds=2)
    at_first_order(here, 1, here.kill)
    until(lambda: here.rotations["b"].position.turn >= (1, 1))
    here.restart("a")
    here.wait()
    leaders = leaders_of(here)
    assert leaders[1, 0] == "a"
    assert leaders[1, 1] == "b"


@pytest.mark.parametrize("round", [1, 2])
def test_a_leader_without_progress_is_given_up(
    round: int, turns: Callable[..., Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leader of this round stays connected, but its combine does not end. A successor repeats the round."""
    here = turns(start=False, method="scaffold", waits=Waits(deadline=2.0, grace=30.0))
    goes_on, stuck, combine = threading.Event(), list[str](), AggregatorRuntime.hub

    def endless(fed: AggregatorRuntime, *args: Any) -> Any:
        if fed.round == round and not stuck:
            stuck.append(fed.me)
            goes_on.wait(WAIT)
        return combine(fed, *args)

    monkeypatch.setattr(AggregatorRuntime, "hub", endless)
    for site in here.ids:
        here.start(site)
    until(lambda: (round, 1) in leaders_of(here))
    goes_on.set()  # it comes back to life, and follows
    real, simulated = here.wait(), here.simulated()
    assert stuck == ["ab"[round - 1]]
    assert leaders_of(here)[round, 1] == "bc"[round - 1]
    one, other = models(real, simulated)
    assert one == other


def test_if_the_leader_and_the_one_before_it_are_lost_the_run_waits_and_says_for_whom(
    turns: Callable[..., Turns],
) -> None:
    here = turns(start=False, rounds=3)
    at_first_order(here, 2, lambda leader: (here.kill("a"), here.kill(leader)), step=":evaluate")
    until(lambda: "round 2 waits for b or a to come back" in here.rotations["c"].links.last_error)
    here.restart("b")
    here.restart("a")
    real, simulated = here.wait(), here.simulated()
    one, other = models(real, simulated)
    assert one == other


def test_a_site_that_is_asked_twice_may_answer_twice(
    turns: Callable[..., Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a new connection a site is asked again, and its second answer is nobody's failure."""
    take = LinkTransport.reply

    def twice(transport: LinkTransport, *reply: Any) -> None:
        take(transport, *reply)
        take(transport, *reply)

    monkeypatch.setattr(LinkTransport, "reply", twice)
    here = turns(rounds=2)
    real, simulated = here.wait(), here.simulated()
    assert booked(real) == booked(simulated)


# Roles ----------------------------------------------------------------------------------------------------------------


def test_roles_decide_who_trains_and_who_aggregates(turns: Callable[..., Turns]) -> None:
    """The same numbers and bytes as in simulation; the proxy's bytes are booked, and nothing else of it."""
    roles = "a=trainer,b=aggregator,d=aggregator,p=proxy,s=idle"
    here = turns(ids=("a", "b", "c", "d", "p", "s"), method="scaffold", rounds=3, roles=roles)
    assert set(here.rotations) == {"a", "b", "c", "d"}
    real, simulated = here.wait(), here.simulated()
    assert booked(real) == booked(simulated)
    assert told(real) == told(simulated)
    one, other = models(real, simulated)
    assert one == other
    assert {sender for sender, _, head, _ in here.letters if head["kind"] == "order"} == {"b", "d"}
    for record in booked(real)[1:]:
        assert record["participants"] == ["a", "b", "c", "d"]
        sent, received = record["bytes_by_node"]["p"]
        assert sent == received == sum(up for name, (up, _) in record["bytes_by_node"].items() if name != "p")


def test_the_terms_name_topology_and_roles(turns: Callable[..., Turns]) -> None:
    here = turns(start=False, roles="a=aggregator")
    terms = here.start("a").terms
    assert Terms.parse(terms.head()) == terms
    assert len({terms.digest, replace(terms, roles="b=aggregator").digest, replace(terms, topology="").digest}) == 3
    site = here.rotations["a"].site
    text = "\n".join(explain(terms, site.experiment, site.method))
    assert "Aggregators, in turn: a; roles a=aggregator" in text
    assert "the site that aggregates in a round (sealed: nobody else can read it)" in text
    with pytest.raises(Malformed, match="impossible roles"):
        Terms.parse({**terms.head(), "roles": "a=king"})
