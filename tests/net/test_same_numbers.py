"""Every registered method gives the same numbers in simulation and between real processes over gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from place import Place
from told import booked, simulate, told

from kilter import data as kdata
from kilter.core import Rows
from kilter.methods import methods
from kilter.records import wire
from small import same

QUICK = ("fedbn", "scaffold")  # the others are slow only because there are many
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in methods()]


def graphs(name: str) -> list[str]:
    """The graphs a method can run over between peers."""
    needs = methods()[name].needs
    return [] if "aggregator" in needs else ["full"] if "everyone" in needs else ["ring", "full"]


OVER = [
    pytest.param(name, graph, marks=() if (name, graph) == ("scaffold", "ring") else pytest.mark.slow)
    for name in methods()
    for graph in graphs(name)
]


def know_the_secrets(here: Place) -> None:
    """Give every site the run's seed as its secret: with secrets of its own, SLFed's pictures would be others."""
    for folder in (f"{kind}-{site}" for site in here.sites for kind in ("state", "run")):
        (here.folder / folder).mkdir(mode=0o700)
        (here.folder / folder / "secret").write_text(f"{here.experiment['seed']:x}")


@pytest.mark.parametrize("name", EVERY)
def test_star_gives_the_numbers_of_the_simulation(name: str, place: Callable[..., Place]) -> None:
    relayed = "everyone" in methods()[name].needs  # peers' mail through the server, sealed
    here = place(method=name, public=2, topology="full" if relayed else "star")
    know_the_secrets(here)
    server = here.serve()
    sites = here.all()
    server.wait()
    for site in sites:
        site.wait()
    simulated, real = simulate(here), here.folder / "run"
    assert booked(real, relayed) == booked(simulated, relayed)
    assert told(real) == told(simulated)
    models = [folder / "model.safetensors" for folder in (real, simulated)]
    assert models[0].exists() == models[1].exists()
    if models[0].exists():
        assert models[0].read_bytes() == models[1].read_bytes()
        assert (
            here.summary()["global_accuracy"] == json.loads((simulated / "summary.json").read_text())["global_accuracy"]
        )


@pytest.mark.parametrize(("name", "graph"), OVER)
def test_peers_give_the_numbers_of_the_simulation(name: str, graph: str, place: Callable[..., Place]) -> None:
    """Every peer by itself: what it keeps at the end, and how it is examined. Four peers: a ring is not a full graph."""
    here = place(sites=("a", "b", "c", "d"), method=name, topology=graph)
    know_the_secrets(here)
    public = "public" in methods()[name].needs
    peers = here.peers(*(["--public", "a.npz"] if public else []))
    for peer in peers.values():
        peer.wait()
    digits = kdata.load(here.folder / "a.npz")
    rows = Rows({"x": digits.x, "y": digits.y}, digits.train)
    simulated = simulate(here, bench=None, public=rows if public else None)
    for site in here.sites:
        real = here.folder / f"run-{site}"
        assert told(real)[site] == told(simulated)[site]
        assert [r["failures"] for r in booked(real)] == [[], [], []]
        (kept,) = (real / "nodes").glob(f"{site}@*")
        (like,) = (simulated / "nodes").glob(f"{site}@*")
        assert same(wire.decode(kept.read_bytes()), wire.decode(like.read_bytes()))


@pytest.mark.parametrize("name", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_blind_relay_gives_the_numbers_of_the_simulation(name: str, place: Callable[..., Place]) -> None:
    """Pool methods over a ring, every letter sealed and passed on by a server that cannot read it."""
    here = place(sites=("a", "b", "c", "d"), method=name, topology="ring")
    server = here.serve()
    here.all()
    server.wait()
    simulated = simulate(here, bench=None, public=None)
    assert told(here.folder / "run") == told(simulated)
    assert booked(here.folder / "run", relayed=True) == booked(simulated, relayed=True)
