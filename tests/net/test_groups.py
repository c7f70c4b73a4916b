"""Sites that aggregate in groups, as real processes: the numbers of the simulation through a relay and over direct links."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from place import Place
from test_same_numbers import know_the_secrets
from told import booked, simulate, told

from kilter import data as kdata
from kilter.experiment import Experiment
from kilter.methods import methods
from kilter.net.audit import verify
from kilter.net.data_description import DataDescription
from kilter.net.results import check_spread
from kilter.net.terms import Terms
from kilter.records import wire
from kilter.records.wire import Malformed
from kilter.runtimes.step_names import StepKind, StepName
from kilter.topology import topology
from small import method as make_method
from small import same

SITES = ("a", "b", "c", "d", "e")
QUALIFY = [
    pytest.param(name, marks=() if name in ("fedavg", "scaffold") else pytest.mark.slow)
    for name, kind in methods().items()
    if not kind.needs & {"aggregator", "everyone"} and kind.states_average
]


@pytest.mark.parametrize("name", QUALIFY)
def test_over_direct_links_the_numbers_are_those_of_the_simulation(name: str, place: Callable[..., Place]) -> None:
    """Every site by itself: what it keeps at the end, and how it is examined."""
    here = place(sites=SITES, method=name, topology="aggregators:2", roles="b=aggregator,d=aggregator")
    know_the_secrets(here)
    for peer in here.peers().values():
        peer.wait()
    simulated = simulate(here, bench=None, public=None)
    for site in here.sites:
        real = here.folder / f"run-{site}"
        assert told(real)[site] == told(simulated)[site]
        assert here.failures(f"run-{site}") == []
        (kept,) = (real / "nodes").glob(f"{site}@*")
        assert same(wire.decode(kept.read_bytes()), wire.decode((simulated / "nodes" / kept.name).read_bytes()))
    letters = {(e.step, e.to) for e in verify(here.folder / "run-c/audit.jsonl") if e.event == "letter"}
    assert {to for _, to in letters} <= {"d"}  # c's group: b, a, e; d, c


@pytest.mark.parametrize("name", QUALIFY)
def test_through_a_sealing_relay_the_numbers_are_those_of_the_simulation(
    name: str, place: Callable[..., Place]
) -> None:
    here = place(sites=SITES, method=name, topology="aggregators:2", roles="b=aggregator,d=aggregator")
    know_the_secrets(here)
    server = here.serve()
    sites = here.all()
    server.wait()
    for site in sites:
        site.wait()
    simulated = simulate(here, bench=None, public=None)
    assert told(here.folder / "run") == told(simulated)
    assert booked(here.folder / "run", relayed=True) == booked(simulated, relayed=True)


def test_the_terms_name_the_groups(place: Callable[..., Place]) -> None:
    """A site asks a person before it takes part: the text says who aggregates for whom, and that row counts leave."""
    here = place(sites=SITES, topology="aggregators:2", roles="d=aggregator,b=aggregator")
    here.serve()
    shown = here.join("c", "--dry-run").wait()
    assert "Groups, the aggregator first: b, a, e; d, c (roles d=aggregator,b=aggregator)" in " ".join(shown.split())
    assert "the aggregator of its group (sealed: the server cannot read it)" in " ".join(shown.split())


def test_impossible_topologies_in_terms_are_refused() -> None:
    experiment = Experiment.of({"topology": "aggregators:2", "roles": "c=aggregator,b=aggregator"})
    graph = topology("aggregators:2", "abcd", 0, ("b", "c"))
    terms = Terms.write("0" * 32, "1" * 32, experiment, DataDescription.of(kdata.load("digits")), graph, "a")
    assert Terms.parse(terms.head()) == terms
    assert terms.group_of("d") == (("c", "d"), ("b", "c"))
    for text in ("ring", "aggregators", "aggregators:0", "aggregators:x", "rotating:1"):
        with pytest.raises(Malformed, match="impossible topology"):
            Terms.parse({**terms.head(), "topology": text})


def test_no_order_chooses_who_receives_what_a_site_submits() -> None:
    """The terms name the aggregator; an order that names receivers is refused."""
    method, submit = make_method("fedavg"), StepName("train", StepKind.SUBMIT)
    check_spread({"view": None}, method, submit)
    for message in ({"view": None, "to": ["b"]}, {"to": ["b"]}, {"view": "_private"}, {"view": 3}, None):
        with pytest.raises(Malformed):
            check_spread(message, method, submit)
