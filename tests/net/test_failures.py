"""Failures, really caused: the run goes on with whoever is there, nothing is lost, and the record says what happened."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from place import WAIT, Place
from proxy import Proxy
from test_same_numbers import booked, simulate

from kilter.records import wire
from small import same

# A fit that takes a while, so that something can happen in the middle of it.
LONG = {"lr": 0.1, "batch": 1, "epochs": 3}


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_node_killed_in_a_fit_comes_back_with_its_state_and_changes_nothing(place: Callable[..., Place]) -> None:
    """kill -9 in the middle of round 2's fit; started again within the grace, the run ends bit for bit as if nothing was."""
    here = place(method="scaffold", rounds=3, local=LONG)
    server = here.serve("--grace", "100")
    first, *others = here.all()
    first.until("round 1, train")
    first.until("evaluate")
    time.sleep(0.2)
    first.kill()
    again = here.join("a")
    server.wait()
    for site in (again, *others):
        site.wait()
    assert "a is here again" in server.said()
    assert here.failures() == []
    assert model(here.folder / "run") == model(simulate(here))


def test_a_server_killed_in_a_round_goes_on_with_it_and_changes_nothing(place: Callable[..., Place]) -> None:
    """kill -9 of the server in round 2; sites reconnect by themselves, roll back what the lost round did, and all is as if."""
    here = place(method="scaffold", rounds=3, local=LONG)
    server = here.serve()
    sites = here.all()
    server.until("round 1/3")
    sites[0].until("round 2, train")
    server.kill()
    again = here.serve(port=here.port)
    again.wait()
    for site in sites:
        site.wait()
    assert [r["round"] for r in here.rounds()] == [0, 1, 2, 3]
    assert here.failures() == []
    simulated = simulate(here)
    assert model(here.folder / "run") == model(simulated)
    assert booked(here.folder / "run") == booked(simulated)


@pytest.mark.slow
def test_a_node_that_joins_late_takes_part_from_then_on(place: Callable[..., Place]) -> None:
    here = place(method="scaffold", rounds=6, local=LONG)
    server = here.serve("--quorum", "2", "--grace", "0")
    here.join("a"), here.join("b")
    server.until("round 1/6")
    late = here.join("c")
    server.wait()
    late.wait()
    rounds = here.rounds()
    assert rounds[1]["participants"] == ["a", "b"]
    assert {"node": "c", "step": "train", "reason": "it is not connected", "kind": "absent"} in rounds[1]["failures"]
    assert rounds[-1]["participants"] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_slow_node_is_left_out_and_its_late_reply_discarded(place: Callable[..., Place]) -> None:
    """Its state goes back to before the step whose reply was not taken, as if it had not been asked."""
    here = place(method="scaffold", rounds=4)
    server = here.serve("--quorum", "2", "--deadline", "2")
    here.join("a"), here.join("b")
    slow = here.join("c", KILTER_TEST_SLOW="4")
    server.wait()
    reasons = {f["reason"] for f in here.failures() if f["node"] == "c"}
    assert "it did not answer before the deadline" in reasons
    assert "its reply came after the deadline and was discarded" in reasons
    assert here.rounds()[-1]["participants"] == ["a", "b"]
    slow.wait()


@pytest.mark.slow
def test_a_cut_network_that_heals_changes_nothing(place: Callable[..., Place]) -> None:
    here = place(method="scaffold", rounds=3, local=LONG)
    server = here.serve("--grace", "100")
    with Proxy(here.port) as proxy:
        site = here.join("a", port=proxy.port)
        others = [here.join("b"), here.join("c")]
        site.until("round 1, train")
        proxy.cut()
        server.until("a left")
        proxy.heal()
        server.wait()
        for one in (site, *others):
            one.wait()
    assert here.failures() == []
    assert model(here.folder / "run") == model(simulate(here))


@pytest.mark.slow
def test_a_full_disk_at_a_site_costs_its_replies_and_nothing_else(place: Callable[..., Place]) -> None:
    here = place(method="scaffold", rounds=2)
    server = here.serve()
    here.join("a"), here.join("b")
    poor = here.join("c", KILTER_TEST_DISK="3000")  # files of at most so many bytes; its state needs more
    server.wait()
    assert poor.wait()
    assert re.search("could not be written", poor.said())
    assert {(f["node"], f["step"]) for f in here.failures()} == {("c", "train")}
    assert "Mistake" in here.failures()[0]["reason"]
    assert [r["participants"] for r in here.rounds()[1:]] == [["a", "b"]] * 2


@pytest.mark.slow
def test_below_the_quorum_the_run_waits(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=3, local=LONG)
    server = here.serve("--quorum", "2", "--grace", "0")
    sites = here.all()
    server.until("round 1/3")
    sites[0].kill()
    sites[1].kill()
    server.until("waits for a quorum of 2")
    here.join("a")
    server.wait()
    assert all(len(r["participants"]) >= 2 for r in here.rounds()[1:])


@pytest.mark.slow
def test_a_peer_killed_between_two_steps_comes_back_and_changes_nothing(place: Callable[..., Place]) -> None:
    """kill -9 of a peer in round 2; started again within the grace, everyone ends bit for bit as if nothing was."""
    here = place(sites=("a", "b", "c", "d"), method="scaffold", rounds=3, local=LONG, topology="ring")
    peers = here.peers("--grace", "100")
    peers["b"].until("round 1/3")
    peers["b"].kill()
    peers["b"] = here.peer("b", "--grace", "100")
    for peer in peers.values():
        peer.wait()
    simulated = simulate(here, bench=None, public=None)
    for site in here.sites:
        assert here.failures(f"run-{site}") == []
        (kept,) = (here.folder / f"run-{site}/nodes").glob(f"{site}@*")
        assert same(wire.decode(kept.read_bytes()), wire.decode((simulated / "nodes" / kept.name).read_bytes()))


@pytest.mark.slow
def test_without_a_peer_that_stays_away_the_others_go_on(place: Callable[..., Place]) -> None:
    here = place(sites=("a", "b", "c", "d"), method="fedavg", rounds=4, local=LONG, topology="full")
    peers = here.peers("--grace", "1", "--deadline", "60")
    peers["b"].until("round 1/4")
    peers["b"].kill()
    for site in "acd":
        peers[site].wait()
        assert {f["node"] for f in here.failures(f"run-{site}")} == {"b"}
        assert here.summary(f"run-{site}")["rounds"] == 4


@pytest.mark.slow
def test_a_peer_that_the_others_went_on_without_goes_on_with_them(place: Callable[..., Place]) -> None:
    """Killed, given up after the grace, started again: it enters the round the others are in, and they count it in again."""
    here = place(sites=("a", "b", "c", "d"), method="fedavg", rounds=12, local=LONG, topology="full")
    peers = here.peers("--grace", "1", "--deadline", "60")
    peers["b"].until("round 1/12")
    peers["b"].kill()
    peers["a"].until("b is gone")
    peers["b"] = here.peer("b", "--grace", "1", "--deadline", "60")
    peers["b"].until("going on with them")
    for site in here.sites:
        peers[site].wait()
        assert here.summary(f"run-{site}")["rounds"] == 12
    missed = {r["round"] for r in here.rounds("run-a") for f in r["failures"] if f["node"] == "b"}
    assert missed, "nobody went on without it"
    assert max(missed) < 12, "it was not counted in again"
    own = [r["round"] for r in here.rounds("run-b")]
    assert own == sorted(set(own))
    assert set(own) < set(range(13)), "it ran every round itself"
