"""Roles by name: who trains, who aggregates, and what a wrong role says."""

from __future__ import annotations

import pytest

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.federate import federate
from kilter.runtimes.roles import Roles, parse_roles

SMALL = {"data": "digits", "rows": 200, "clients": 4, "partition": "iid", "model": "mlp:4", "rounds": 2}


def test_without_roles_everyone_trains_and_aggregates() -> None:
    assert Roles().members(("a", "b")) == Roles().aggregators(("a", "b")) == ("a", "b")


def test_aggregators_by_name_are_the_only_ones() -> None:
    roles = parse_roles("a=aggregator,c=trainer,p=proxy,i=idle")
    assert roles.members(("a", "b", "c", "p", "i")) == ("a", "b", "c")
    assert roles.aggregators(("a", "b", "c")) == ("a",)
    assert roles.proxy == "p"
    assert parse_roles("a=trainer").aggregators(("a", "b")) == ("b",)


@pytest.mark.parametrize(
    ("roles", "topology", "why"),
    [
        ("a=king", "rotating", "Unknown role 'king'"),
        ("a", "rotating", "NAME=ROLE"),
        ("a=idle,a=trainer", "rotating", "twice"),
        ("a=proxy,b=proxy", "rotating", "several proxies"),
        ("a=aggregator", "star", "aggregate in turn"),
    ],
)
def test_a_wrong_role_is_one_sentence(roles: str, topology: str, why: str) -> None:
    with pytest.raises(Mistake, match=why):
        Experiment.of({**SMALL, "roles": roles, "topology": topology})


def test_names_are_checked_when_they_are_known() -> None:
    with pytest.raises(Mistake, match="Unknown name in roles 'nobody'"):
        Experiment.of({**SMALL, "roles": "nobody=idle", "topology": "rotating"}).build()
    everyone = ",".join(f"{name}=trainer" for name in Experiment.of(SMALL).split().clients)
    with pytest.raises(Mistake, match="nobody aggregates"):
        Experiment.of({**SMALL, "roles": everyone, "topology": "rotating"}).build()


def test_a_simulation_follows_the_roles() -> None:
    first, second, third, fourth = Experiment.of(SMALL).split().clients
    roles = f"{first}=idle,{second}=aggregator,{fourth}=proxy"
    method, fed = Experiment.of({**SMALL, "roles": roles, "topology": "rotating"}).build()
    with fed:
        rounds = federate(method, fed, 2).rounds
    for record in rounds[1:]:
        assert record.participants == [second, third]
        assert set(record.bytes_by_node) == {second, third, fourth}
        assert record.bytes_by_node[fourth][0] == sum(up for n, (up, _) in record.bytes_by_node.items() if n != fourth)
