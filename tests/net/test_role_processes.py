"""Roles by name, and a leader that stops, with real processes: relay as proxy, idle sites, sites that only train."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from place import Place
from test_rotation import models
from told import booked, simulate, told

from kilter.net.aggregator import REPEATED
from kilter.net.position import FILE as POSITION
from kilter.net.position import Position
from kilter.records.run_folder import read_summary

ROLES = "a=trainer,b=aggregator,d=aggregator,p=proxy,s=idle"


def test_a_proxy_relays_an_idle_site_is_left_out_and_a_trainer_never_aggregates(place: Callable[..., Place]) -> None:
    """The proxy's certificate opens the relay. Numbers and bytes are those of the simulation, the proxy's included."""
    here = place(sites=("a", "b", "c", "d", "p", "s"), method="scaffold", topology="rotating", rounds=3, roles=ROLES)
    server = here.serve("--tls", "certs/p", "--sites", "a,b,c,d,s")
    sites = {name: here.join(name, "--server-name", "p") for name in ("a", "b", "c", "d")}
    idle = here.join("s", "--server-name", "p")
    server.wait()
    for site in sites.values():
        site.wait()
    assert "it is not on the list of sites" in idle.said()
    idle.kill()
    (summary,) = here.folder.glob("state-*/rotation/*/turn-*/summary.json")
    simulated, real = simulate(here, bench=None), summary.parent
    assert booked(real) == booked(simulated) == booked(here.folder / "run")
    assert told(real) == told(simulated)
    one, other = models(real, simulated)
    assert one == other
    led = {name for name in sites for line in [sites[name].said()] if "this site aggregates" in line}
    assert led == {"b", "d"}


def test_over_direct_links_an_idle_peer_and_a_proxy_are_refused_in_one_sentence(place: Callable[..., Place]) -> None:
    here = place(sites=("a", "b", "c", "s"), topology="rotating", rounds=2, roles="b=aggregator,s=idle")
    peers = here.peers()
    assert "The role of 's' in this run is idle" in " ".join(peers.pop("s").wait(code=2).split())
    for peer in peers.values():
        peer.wait()
    simulated = simulate(here, bench=None)
    for site in peers:
        assert booked(here.folder / f"run-{site}") == booked(simulated)
    here = place(sites=("a", "b", "p"), topology="rotating", roles="p=proxy")
    said = " ".join(here.peers()["a"].wait(code=2).split())
    assert "Direct links need no proxy: start 'p' as a relay (kilter serve), or leave it out." in said


def leader(folder: Path, sites: tuple[str, ...], round: int) -> str:
    """The site that leads this round, once one does."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for site in sites:
            for path in folder.glob(f"*-{site}/**/{POSITION}"):
                position = Position.read(path.parent)
                if position.phase == "leading" and position.turn.round == round:
                    return site
        time.sleep(0.01)
    raise AssertionError(f"nobody leads round {round}")


@pytest.mark.parametrize("direct", [False, True])
def test_a_leader_that_is_stopped_is_given_up_and_follows_when_it_goes_on(
    direct: bool, place: Callable[..., Place]
) -> None:
    """SIGSTOP: its connections stay open, and nothing happens any more."""
    here = place(method="scaffold", topology="rotating", rounds=4, local={"lr": 0.1, "batch": 1, "epochs": 5})
    waits = ("--deadline", "4", "--grace", "4", "--quorum", "2")
    if direct:
        processes = here.peers(*waits)
    else:
        server = here.serve(*waits)
        processes = {site: here.join(site) for site in here.sites}
    stopped = leader(here.folder, here.sites, 2)
    os.kill(processes[stopped].popen.pid, signal.SIGSTOP)
    leader(here.folder, tuple(site for site in here.sites if site != stopped), 2)
    os.kill(processes[stopped].popen.pid, signal.SIGCONT)
    if not direct:
        server.wait()
    for process in processes.values():
        process.wait()
    folder = f"run-{stopped}" if direct else "run"
    summary = read_summary(here.folder / folder)
    assert summary.rounds == 4
    assert REPEATED in [notice.what for notice in summary.notices]
