"""Robust aggregation: a fifth of lying clients ruins the mean, and not these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kilter.core import Replies, Tree
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.params import average, scale, sub
from kilter.runtimes.robust import clip, krum, median, parse, robust, trimmed
from kilter.runtimes.simulation import Simulation
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import Done
from small import bench, method, skewed, three_ways

RULES = ["clip:1", "median", "trimmed:0.2", "krum:0.2"]


class Liars(Simulation):
    """Two of ten clients send their update with its sign changed, ten times as long, and boast of their rows."""

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        done = dict(super().execute(name, messages))
        for i in ("c3", "c7") if name == StepName("train") else ():
            w, n = done[i].reply
            done[i].reply = sub(messages[i], scale(sub(w, messages[i]), 10.0)), n * 10
        return done


def accuracy(rule: str, kind: type[Simulation] = Liars) -> float:
    parts = np.array_split(
        np.random.default_rng(0).permutation(1300), 10
    )  # alike: on skewed data robustness costs more
    clients = {f"c{k}": three_ways(part) for k, part in enumerate(parts)}
    with kind(clients, bench=bench(), seed=1) as fed:
        fed.robust = rule
        return float(federate(method("fedavg"), fed, 12, evaluate_every=12).summary.global_accuracy)


def test_a_fifth_of_liars_ruins_the_mean_and_not_these() -> None:
    honest = accuracy("", Simulation)
    assert honest > 0.6
    assert accuracy("") < 0.3
    for rule in RULES:
        assert accuracy(rule) > honest - 0.2, rule


@pytest.mark.parametrize("rule", RULES)
def test_a_huge_update_moves_nothing_far(rule: str) -> None:
    rng = torch.Generator().manual_seed(0)
    said: dict[str, Any] = {f"c{k}": ({"w": 1 + 0.1 * torch.randn(50, generator=rng)}, 10) for k in range(9)}
    said["enemy"] = {"w": torch.full((50,), 1e9)}, 10**400
    actual = average(robust(Replies(said, of=10), rule).values())
    assert (actual["w"] - 1).abs().max() < 0.3


def test_the_rules_by_hand() -> None:
    v = torch.tensor([[0.0, 1.0], [1.0, 5.0], [2.0, 3.0], [100.0, -100.0]])
    assert median(v).tolist() == [1.5, 2.0]
    assert trimmed(v, 1).tolist() == [1.5, 2.0]
    assert trimmed(v, 9).tolist() == [1.5, 2.0]
    assert krum(v, 1) == {0, 1, 2}
    near = clip(v, 1.0)
    assert torch.allclose((near - median(v)).norm(dim=1).max(), median((v - median(v)).norm(dim=1, keepdim=True))[0])


@pytest.mark.parametrize("rule", RULES)
def test_those_who_agree_are_left_as_they_are(rule: str) -> None:
    reply = ({"w": torch.tensor([1.5, -2.0]), "count": torch.tensor(3)}, 7, ["x", None, True])
    actual = robust(Replies(dict.fromkeys("abcde", reply), of=5), rule)
    for one in actual.values():
        assert torch.equal(one[0]["w"], reply[0]["w"])
        assert one[1:] == reply[1:]
        assert isinstance(one[1], int)


def test_under_peers_every_node_is_robust_for_itself() -> None:
    """Over a full graph every node aggregates as the star's server does."""
    made = []
    for topology in ("star", "full"):
        with Simulation(skewed(5), bench=bench(), topology=topology, seed=2, stack=False) as fed:
            fed.robust = "trimmed:0.2"
            result = federate(method("fedavg"), fed, 2)
            made.append(result.model or fed.states["c0"]["~pool"])
    assert all(torch.equal(made[0][k], made[1][k]) for k in made[0])


@pytest.mark.parametrize("spec", ["mean", "trimmed:0.5", "krum:0", "clip:-1", "clip:x"])
def test_a_rule_that_cannot_work_is_refused(spec: str) -> None:
    with pytest.raises(Mistake):
        parse(spec)


def test_replies_that_differ_cannot_be_compared() -> None:
    said = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(3)}
    with pytest.raises(Mistake, match="one shape"):
        robust(Replies(said, of=3), "median")
    assert robust(Replies({"a": 1}, of=3), "median") == {"a": 1}
