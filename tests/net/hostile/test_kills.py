"""More than a hundred kills of servers, sites and peers at any moment: every run ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random

import pytest
from place import Place, Process
from told import booked, simulate, told

from kilter.records import wire
from small import same

LONG = {"lr": 0.1, "batch": 1, "epochs": 1}


@pytest.mark.parametrize("seed", range(3))
def test_kills_of_servers_and_sites_change_nothing(place: Callable[..., Place], seed: int) -> None:
    rng = Random(seed)
    here = place(method="scaffold", rounds=60, local=LONG)
    server = here.serve("--grace", "200")
    port = here.port
    processes = {site: here.join(site, port=port) for site in here.sites}
    kills = 0
    while kills < 25 and server.alive():
        time.sleep(rng.uniform(0.05, 0.9))
        victim = rng.choice(["server", *here.sites])
        if victim == "server":
            server.kill()
            server = here.serve("--grace", "200", port=port)
        else:
            processes[victim].kill()
            processes[victim] = here.join(victim, port=port)
        kills += 1
    server.wait()
    assert kills == 25
    assert here.failures() == []
    simulated = simulate(here)
    assert (here.folder / "run/model.safetensors").read_bytes() == (simulated / "model.safetensors").read_bytes()
    assert booked(here.folder / "run") == booked(simulated)
    assert told(here.folder / "run") == told(simulated)


@pytest.mark.parametrize("topology", ["ring", "aggregators:2"])
def test_kills_of_peers_change_nothing(place: Callable[..., Place], topology: str) -> None:
    rng = Random(5)
    here = place(sites=("a", "b", "c", "d"), method="scaffold", rounds=60, local=LONG, topology=topology)
    peers = here.peers("--grace", "200")
    kills = 0
    while kills < 25 and all(p.alive() for p in peers.values()):
        time.sleep(rng.uniform(0.05, 0.9))
        victim = rng.choice(here.sites)
        if not peers[victim].alive():
            break
        peers[victim].kill()
        if (here.folder / f"run-{victim}/summary.json").exists():
            break
        peers[victim] = here.peer(victim, "--grace", "200")
        kills += 1
    for peer in peers.values():
        peer.popen.join(120)
    assert kills == 25
    simulated = simulate(here, bench=None, public=None)
    for site in here.sites:
        assert here.failures(f"run-{site}") == []
        (kept,) = (here.folder / f"run-{site}/nodes").glob(f"{site}@*")
        assert same(wire.decode(kept.read_bytes()), wire.decode((simulated / "nodes" / kept.name).read_bytes()))


def test_kills_of_sites_that_aggregate_in_turn_change_nothing(place: Callable[..., Place]) -> None:
    """Thirty kills of aggregators, members and the relay: the same model, records and bytes as in simulation."""
    rng = Random(7)
    here = place(method="scaffold", rounds=60, local=LONG, topology="rotating")
    server = here.serve("--grace", "200")
    port = here.port
    processes = {site: here.join(site, port=port) for site in here.sites}
    kills = {"leader": 0, "member": 0, "relay": 0}
    while sum(kills.values()) < 30 and server.alive():
        wait_for_a_round(here, server)
        time.sleep(rng.uniform(0.0, 0.4))
        if rng.random() < 0.1:
            kills["relay"] += 1
            server.kill()
            server = here.serve("--grace", "200", port=port)
            continue
        leaders = [site for site in here.sites if phase(here, site) == "leading"]
        victim = rng.choice(leaders if leaders and rng.random() < 0.6 else here.sites)
        kills["leader" if victim in leaders else "member"] += 1
        processes[victim].kill()
        processes[victim] = here.join(victim, port=port)
    server.wait()
    assert sum(kills.values()) == 30
    assert kills["leader"] >= 5
    assert here.failures() == []
    for process in processes.values():
        process.wait()
    (summary,) = here.folder.glob("state-*/rotation/*/turn-*/summary.json")
    real, simulated = summary.parent, simulate(here, bench=None)
    assert (real / "model.safetensors").read_bytes() == (simulated / "model.safetensors").read_bytes()
    assert booked(real) == booked(simulated) == booked(here.folder / "run")
    assert told(real) == told(simulated)


def wait_for_a_round(here: Place, server: Process) -> None:
    """So that every kill hits a run that goes on."""
    path, end = here.folder / "run/rounds.jsonl", time.monotonic() + 120
    before = path.stat().st_size if path.exists() else 0
    while server.alive() and time.monotonic() < end and (not path.exists() or path.stat().st_size <= before):
        time.sleep(0.02)


def phase(here: Place, site: str) -> str:
    """What a site does just now in its turn."""
    for path in here.folder.glob(f"state-{site}/rotation/*/position.json"):
        return str(json.loads(path.read_text())["phase"])
    return ""
