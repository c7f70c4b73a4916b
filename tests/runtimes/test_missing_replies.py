"""Replies that are missing or refused, and the topologies in which they travel."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from talk import Talk, talking
from torch import Tensor

from kilter.core import AtNodes, Each, Fit, Method, Node, Params, Replies, step
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.params import average
from kilter.runtimes.simulation import Missing
from kilter.runtimes.step_runner import POOL
from kilter.train import SGD
from small import federation, method, mlp_task, normed_task, same, skewed

POOLS = ["fedavg", "fedprox", "scaffold", "fedbn"]  # written with `pool`


# What a reply must look like -----------------------------------------------------------------------------------------

W = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"w": torch.tensor([1.0, float("nan")])}, "not finite at w"),
        ({"w": torch.tensor([1.0, float("inf")])}, "not finite at w"),
        ({"w": torch.ones(3)}, "differs in shape"),
        ({"w": torch.ones(2).double()}, "differs in shape"),
        ({"v": torch.ones(2)}, "differs in shape"),
        ({}, "differs in shape"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, "differs in shape"),
        (W["w"], "differs in shape"),
        ([torch.ones(2)], "differs in shape"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_reply_unlike_the_others_is_refused_with_a_reason(odd: Any, reason: str) -> None:
    with talking(federation()) as fed:
        actual = fed.map(Talk().lie, dict.fromkeys(fed.ids, W) | {"c2": odd})
        assert list(actual) == ["c0", "c1", "c3"]
        record = fed.ledger.close()
        assert record.participants == ["c0", "c1", "c3"]
        (failure,) = record.failures
        assert (failure.node, failure.step) == ("c2", "lie")
        assert reason in failure.reason
        assert record.bytes_by_node["c2"][0] == 0


def test_steps_may_say_that_replies_differ() -> None:
    with talking(federation()) as fed:
        replies = Each({i: torch.ones(k) for k, i in enumerate(fed.ids)})
        assert list(fed.map(Talk().answer, replies)) == list(fed.ids)
        assert fed.ledger.close().failures == []
        fed.map(Talk().answer, Each(c0=1.0, c1=float("nan")))
        assert "not finite" in fed.ledger.close().failures[0].reason  # but not in that


def test_a_list_is_not_a_tuple() -> None:
    with talking(federation()) as fed:
        actual = fed.map(Talk().lie, dict.fromkeys(fed.ids, (1, 2)) | {"c2": [1, 2]})
        assert "c2" not in actual
        assert "nesting differs" in fed.ledger.close().failures[0].reason


@dataclass(frozen=True, kw_only=True)
class Poisoned(Method):
    """FedAvg in which some nodes return nonsense."""

    bad: tuple[tuple[str, str], ...] = ()

    def setup(self, fed: Any) -> Params:
        return self.task.init(fed.seed)

    def round(self, fed: Any, state: Params) -> Params:
        return fed.pool(self.train, self.combine, state)

    @step
    def train(self, node: Node, w: Params) -> Generator[Fit, Params, tuple[Params, int]]:
        w = yield node.fit(self.loss, w, self.local)
        how = dict(self.bad).get(node.id)
        if how == "nan":
            w = {k: v * float("nan") for k, v in w.items()}
        if how == "shape":
            w = {k: v[None] for k, v in w.items()}
        return w, len(node.data.train)

    @step
    def combine(self, hub: Node, w: Params, replies: Replies) -> Params:
        return average(replies.values())

    def loss(self, w: Params, batch: Any, _: Any) -> Tensor:
        return self.task.loss(w, batch)


@pytest.mark.parametrize("topology", ["star", "rotating", "full"])
def test_missing_and_invalid_replies_are_left_out_and_the_rest_renormalised(topology: str) -> None:
    clients = skewed()
    good = {i: clients[i] for i in ("c0", "c3")}
    fine = federate(method("fedavg"), federation(good), 1).model

    def absent(seed: int, round: int, node: str, step: str) -> str | None:
        return "asleep" if node == "c1" and "train" in step else None

    with federation(clients, faults=absent, topology=topology) as fed:
        result = federate(Poisoned(task=mlp_task(), local=SGD(lr=0.1, batch=16), bad=(("c2", "nan"),)), fed, 1)
        record = result.rounds[1]
        if topology == "full":  # c2's letter is a Post with NaN in it: refused before it is delivered
            assert same(fed.states["c0"][POOL], fine)
        else:
            assert same(result.model, fine)
        assert {(f.node, f.reason.split(" at ")[0]) for f in record.failures} == {
            ("c1", "asleep"),
            ("c2", "its reply is not finite"),
        }
        assert not {"c1", "c2"} & set(record.participants) or topology == "full"
        assert result.summary.failures == 2


def test_nothing_valid_leaves_the_state_as_it_was() -> None:
    with federation(faults=lambda *_: "storm") as fed:
        run = method("fedavg")
        with pytest.warns(UserWarning, match=r"No reply of any client could be used in any round .absent: 8."):
            result = federate(run, fed, 2)
        assert same(result.model, run.task.init(0))
        assert result.summary.outcome == "no valid replies"
        assert [len(r.failures) for r in result.rounds] == [0, 5, 5]
        assert "no valid reply" in result.rounds[1].failures[-1].reason
        assert result.rounds[1].loss is None


@pytest.mark.parametrize("topology", ["star", "rotating", "ring"])
@pytest.mark.parametrize("name", [*POOLS, "solo"])
def test_every_method_lives_with_nodes_that_come_and_go(name: str, topology: str) -> None:
    with federation(faults=Missing(0.4), topology=topology, seed=1) as fed:
        result = federate(method(name, normed_task()), fed, 3)
        assert result.summary.failures > 0
        assert result.summary.global_accuracy is not None
        assert all(r.valid for r in result.rounds[1:])


def test_missing_is_by_chance_of_its_own_with_the_given_probability() -> None:
    rule = Missing(0.25)
    actual = [rule(0, r, "a", "train") for r in range(2000)]
    assert 420 < sum(f is not None for f in actual) < 580
    assert actual == [rule(0, r, "a", "train") for r in range(2000)]
    assert not any(Missing(0.0)(0, r, "a", "train") for r in range(100))
    assert all(Missing(1.0)(0, r, "a", "train") for r in range(100))


# Topologies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POOLS)
def test_peers_over_the_full_graph_are_the_star_bit_for_bit(name: str) -> None:
    run = method(name, normed_task())
    star, full, turn = (federation(topology=t) for t in ("star", "full", "rotating"))
    one, two, three = (federate(run, fed, 3) for fed in (star, full, turn))
    assert isinstance(two.state, AtNodes)
    for i in star.ids:
        assert same(full.states[i][POOL], one.state)
        assert same({k: v for k, v in full.states[i].items() if k != POOL}, star.states.get(i, {}))
    assert same(three.state, one.state)
    assert one.summary.client_accuracy == two.summary.client_accuracy == three.summary.client_accuracy


def test_a_ring_averages_over_the_neighbourhood() -> None:
    clients = skewed()
    run = method("fedavg")
    alone = federation(clients)
    federate(method("solo"), alone, 1)
    models = {i: s["w"] for i, s in alone.states.items()}
    with federation(clients, topology="ring") as fed:
        federate(run, fed, 1)
        for i, near_by in {"c0": ("c0", "c1", "c3"), "c2": ("c1", "c2", "c3")}.items():
            assert same(fed.states[i][POOL], average((models[j], len(clients[j].train)) for j in near_by))


def test_under_peers_only_the_cohort_takes_part_from_the_first_round() -> None:
    with federation(skewed(6), topology="full") as fed:
        run = method("fedavg", cohort=0.5)
        result = federate(run, fed, 2)
        assert all(len(r.participants) == 3 for r in result.rounds[1:])
        for i in set(fed.ids) - {i for r in result.rounds for i in r.participants}:
            assert same(fed.states[i][POOL], run.task.init(0))


def test_one_aggregator_is_needed_by_some() -> None:
    for topology in ("full", "ring"):
        with pytest.raises(Mistake, match="needs one aggregator"):
            federate(method("pooled"), federation(topology=topology), 1)
    with pytest.raises(Mistake, match="needs one aggregator"):
        talking(federation(topology="ring")).hub(Talk().answer, 1)
    assert federate(method("pooled"), federation(topology="rotating"), 1).model is not None


def test_public_data_is_needed_by_some() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Public(Talk):
        needs = frozenset({"public"})

    with pytest.raises(Mistake, match="public"):
        federation(public=None).bind(Public())
    federation().bind(Public())
