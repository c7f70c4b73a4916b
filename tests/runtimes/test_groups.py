"""Several aggregators with groups (aggregators:k): FedAvg gives the star's model, and nobody but its aggregator reads a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.core import Node, Replies
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods import methods
from kilter.params import average
from kilter.records import wire
from kilter.records.run_folder import Store
from kilter.runtimes.evaluation import POOL
from kilter.runtimes.groups import average_states, merge
from kilter.runtimes.ledger import Ledger
from kilter.runtimes.roles import parse_roles
from kilter.runtimes.simulation import Simulation
from kilter.topology import topology
from small import federation, method, near, same

IDS = ["c0", "c1", "c2", "c3", "c4"]
QUALIFY = [
    name for name, kind in methods().items() if not kind.needs & {"aggregator", "everyone"} and kind.states_average
]


def states(fed: Simulation) -> list[Any]:
    """What every node starts the next round from."""
    return [fed.states[name][POOL] for name in fed.ids]


def run(name: str, spec: str, rounds: int = 2, clients: int = 5, roles: str = "", **options: Any) -> Simulation:
    with federation(clients, topology=spec, **options) as fed:
        fed.roles = parse_roles(roles, spec)
        fed.result = federate(method(name), fed, rounds)  # type: ignore[attr-defined]
        return fed


# The groups -----------------------------------------------------------------------------------------------------------


def test_nodes_join_the_groups_in_turn_and_are_linked_to_their_aggregator_only() -> None:
    actual = topology("aggregators:2", IDS, 0)
    assert actual.kind == "peers"
    assert actual.groups == {"c0": ("c0", "c2", "c4"), "c1": ("c1", "c3")}
    assert actual.neighbours == {
        "c0": ("c1", "c2", "c4"),
        "c1": ("c0", "c3"),
        "c2": ("c0",),
        "c3": ("c1",),
        "c4": ("c0",),
    }
    assert actual.group("c3") == ("c1", "c3")


def test_roles_name_the_aggregators() -> None:
    roles = parse_roles("c4=aggregator,c1=aggregator", "aggregators:2")
    assert roles.group_aggregators("aggregators:2", IDS) == ("c1", "c4")  # in the order of the ids
    assert parse_roles("c0=trainer").group_aggregators("aggregators:2", IDS) == ("c1", "c2")
    assert roles.group_aggregators("star", IDS) == ()
    fed = run("fedavg", "aggregators:2", roles="c4=aggregator,c1=aggregator")
    assert fed.topology.groups == {"c1": ("c1", "c0", "c3"), "c4": ("c4", "c2")}


@pytest.mark.parametrize(
    ("spec", "roles", "why"),
    [
        ("aggregators", "", "such as aggregators:2"),
        ("aggregators:0", "", "such as aggregators:2"),
        ("aggregators:x", "", "such as aggregators:2"),
        ("aggregators:1:2", "", "such as aggregators:2"),
        ("aggregators:6", "", "needs 6 nodes that may aggregate, and there are 5"),
        ("aggregators:2", "c0=aggregator", "needs 2 names with the role aggregator, not 1"),
        ("aggregators:3", "c0=trainer,c1=trainer,c2=trainer", "needs 3 nodes that may aggregate, and there are 2"),
    ],
)
def test_impossible_groups_are_refused_in_one_sentence(spec: str, roles: str, why: str) -> None:
    with pytest.raises(Mistake, match=why):
        topology(spec, IDS, 0, parse_roles(roles, spec).group_aggregators(spec, IDS))


# The numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fedavg_in_groups_is_fedavg_under_a_star(count: int) -> None:
    """The mean of the groups' means, weighted by rows, is the mean of all. With one group it is the same computation."""
    with federation(5, stack=False) as star:
        model = federate(method("fedavg"), star, 3).model
    fed = run("fedavg", f"aggregators:{count}", rounds=3, stack=False)
    for state in states(fed):
        assert same(state, model) if count in (1, 5) else near(state, model)


@pytest.mark.parametrize("name", [name for name in QUALIFY if name != "solo"])  # solo does not pool
def test_all_nodes_have_one_state(name: str) -> None:
    fed = run(name, "aggregators:2")
    first, *others = states(fed)
    assert all(same(first, other) for other in others)
    record = fed.result.rounds[-1]  # type: ignore[attr-defined]
    assert record.failures == []
    assert record.notices == []


@pytest.mark.parametrize("name", [name for name in methods() if name not in QUALIFY])
def test_other_methods_are_refused_in_one_sentence(name: str) -> None:
    with (
        federation(5, topology="aggregators:2") as fed,
        pytest.raises(Mistake, match=r"'aggregators:2'.*: use --topology"),
    ):
        fed.bind(method(name))


def test_several_processes_give_the_same_bits() -> None:
    one, other = (run("scaffold", "aggregators:2", workers=workers) for workers in (1, 2))
    assert same(states(one), states(other))


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run("scaffold", "aggregators:2", rounds=4)
    for rounds in (2, 4):
        with federation(5, topology="aggregators:2") as fed:
            store = Store(tmp_path / "run")
            federate(method("scaffold"), fed, rounds, store=store, checkpoint_seconds=0)
            store.close()
    assert same(states(fed), states(whole))


def test_an_aggregator_that_is_absent_costs_its_group_a_round() -> None:
    """c1 cannot combine in round 2: c0's group goes on alone, and c1's group follows when c1 is back."""

    def fault(seed: int, round: int, node: str, step: str) -> str | None:
        return "it is away" if (round, node, step) == (2, "c1", "merge:combine") else None

    fed = run("fedavg", "aggregators:2", rounds=2, faults=fault)
    alone = run("fedavg", "aggregators:2", rounds=1)
    first, *others = states(fed)
    assert all(same(first, other) for other in others)  # c1 heard of c0's state in the exchange
    assert not same(first, states(alone)[0])
    (failure,) = fed.result.rounds[-1].failures  # type: ignore[attr-defined]
    assert (failure.node, failure.step) == ("c1", "merge:combine")


def test_if_nobody_answers_the_states_stay() -> None:
    def fault(seed: int, round: int, node: str, step: str) -> str | None:
        return "it is away" if round == 2 and step.startswith("submit:") else None

    assert same(
        states(run("fedavg", "aggregators:2", rounds=2, faults=fault)), states(run("fedavg", "aggregators:2", rounds=1))
    )


# Letters --------------------------------------------------------------------------------------------------------------


def test_the_ledger_books_replies_to_aggregators_states_between_them_and_states_to_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters: list[tuple[str, str, int]] = []
    book = Ledger.letter

    def letter(ledger: Ledger, sender: str, receiver: str, size: int, training: bool = True) -> None:
        if sender != receiver and training:
            letters.append((sender, receiver, size))
        book(ledger, sender, receiver, size, training)

    monkeypatch.setattr(Ledger, "letter", letter)
    fed = run("fedavg", "aggregators:2", rounds=1)
    state = states(fed)[0]
    rows = {name: len(data.train) for name, data in fed.clients.items()}
    groups = {"c0": rows["c0"] + rows["c2"] + rows["c4"], "c1": rows["c1"] + rows["c3"]}
    sizes = {name: wire.size(((state, n), n)) for name, n in rows.items()}
    assert letters == [
        ("c2", "c0", sizes["c2"]),
        ("c3", "c1", sizes["c3"]),
        ("c4", "c0", sizes["c4"]),
        ("c0", "c1", wire.size((state, groups["c0"]))),
        ("c1", "c0", wire.size((state, groups["c1"]))),
        ("c0", "c2", wire.size(state)),
        ("c0", "c4", wire.size(state)),
        ("c1", "c3", wire.size(state)),
    ]


def test_a_letter_without_a_number_of_rows_is_refused() -> None:
    node = Node("c0", None, group=("c0", "c2"), aggregators=("c0",), state={POOL: 1.0})  # type: ignore[arg-type]
    box = {"c0": (2.0, 5), "c2": (4.0, -1), "c3": (9.0, 5)}  # c3 is not of this group

    def combine(hub: Node, state: float, replies: Replies) -> float:
        assert dict(replies) == {"c0": 2.0}
        assert replies.of == 2
        return replies["c0"]

    def whole(value: Any) -> Any:
        return value
        yield

    running = merge(combine, node, box, "", whole)
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == {"c0": (2.0, 5)}
    assert "the letter of c2 has no number of rows" in node.notes


# Averages -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 1000)), min_size=1, max_size=5))
def test_the_mean_of_states_is_the_average_of_models(pairs: list[tuple[float, int]]) -> None:
    models = [({"w": torch.tensor([value, 1.0]), "~n": torch.tensor([3])}, rows) for value, rows in pairs]
    nested = [((model, [model["w"]], None, "x"), rows) for model, rows in models]
    mean, (expected, parts, none, text) = average(models), average_states(nested)
    assert same(expected, mean)
    assert same(parts, [mean["w"]])
    assert (none, text) == (None, "x")


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({"a": 1.0}, {"b": 1.0}, "differ in shape"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, "differ in shape"),
        ({"a": 1}, {"a": 2}, "other than tensors"),
        ("one", "other", "other than tensors"),
    ],
)
def test_states_without_a_mean_are_refused(one: Any, other: Any, why: str) -> None:
    with pytest.raises(Mistake, match=why):
        average_states([(one, 1), (other, 1)])


def test_averaging_leaves_the_states_as_they_are() -> None:
    one, other = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    assert same(average_states([(one, 1), (other, 1)]), {"w": torch.full((2,), 0.5)})
    assert same([one, other], [{"w": torch.zeros(2)}, {"w": torch.ones(2)}])
