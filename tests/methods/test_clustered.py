"""Clustered FL: when and how a cluster splits, ids that are not positions, and where it is FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import hub

from kilter.blocks.clustering import bipartition, cosines, hdbscan
from kilter.core import Data, Params, Replies, Rows
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.clustered import Clustered
from kilter.tasks import Task
from kilter.train import SGD
from small import digits, federation, linear_task, method, mlp_task, normed_task, same

MOVES = [(1, 0.1), (0.9, 0.2), (-1, 0.1), (-0.8, -0.1)]


def clustered(task: Task | None = None, **settings: Any) -> Clustered:
    settings = {"warm": 0, "unit": "absolute", "eps1": 0.4, "eps2": 1.0, "gamma": 0.0} | settings
    return Clustered(task=task or linear_task([0.0, 0.0]), local=SGD(lr=0.1, batch=16), **settings)


def w(*numbers: float) -> Params:
    return {"w": torch.tensor(numbers, dtype=torch.float32)}


def split(moves: dict[str, tuple[float, ...]], at: tuple[float, ...] = (0, 0), **settings: Any) -> list[list[str]]:
    replies = {i: (w(*(a + m for a, m in zip(at, move, strict=True))), 5) for i, move in moves.items()}
    return clustered(**settings).split({"ids": list(moves), "w": w(*at)}, replies, 1.0)


def test_by_hand() -> None:
    moves = torch.tensor(MOVES, dtype=torch.float64)
    assert moves.mean(0).norm().item() == pytest.approx(0.079057, abs=1e-6)
    assert moves.norm(dim=1).max().item() == pytest.approx(1.004988, abs=1e-6)
    left, right, across = bipartition(cosines(moves))
    assert (left, right) == ([0, 1], [2, 3])
    assert across == pytest.approx(-0.949757, abs=1e-6)
    assert ((1 - across) / 2) ** 0.5 == pytest.approx(0.987359, abs=1e-6)


def test_when_a_cluster_splits() -> None:
    named = dict(zip("abcd", MOVES, strict=True))
    assert split(named) == [["a", "b"], ["c", "d"]]
    assert split(named, at=(3, -2)) == [["a", "b"], ["c", "d"]]  # from wherever the cluster's model is
    assert split(named, eps1=0.079) == [list("abcd")]  # it still moves
    assert split(named, eps2=1.005) == [list("abcd")]  # nobody goes far
    assert split(named, gamma=0.98) == [["a", "b"], ["c", "d"]]
    assert split(named, gamma=0.99) == [list("abcd")]  # not clearly apart


def test_a_nested_split_with_ids_that_are_not_contiguous() -> None:
    """Both public codes take positions within a cluster for ids: a second split then moves the wrong clients."""
    fed = type("Fed", (), {"seed": 0, "ids": tuple("abcdef")})()
    run = clustered(eps1=0.5, eps2=0.9)
    state = run.setup(fed)
    first = {"a": (1, 0), "b": (-1, 0), "c": (1, 0.1), "d": (-1, 0.1), "e": (1, -0.1), "f": (-1, -0.1)}
    state = run.combine(hub(1), state, Replies({i: (w(*m), 1) for i, m in first.items()}, 6))
    assert [c["ids"] for c in state["clusters"]] == [["a", "c", "e"], ["b", "d", "f"]]
    assert [c["w"]["w"].round(decimals=5).tolist() for c in state["clusters"]] == [[1, 0], [-1, 0]]
    # Now b stands against d and f; a, c, e agree and so move on.
    second = {"a": (0, 1), "c": (0, 1), "e": (0, 1), "b": (0, 1), "d": (0, -0.6), "f": (0.1, -0.6)}
    moved = {
        i: (w(*(a + b for a, b in zip(m, (1 if i in "ace" else -1, 0), strict=True))), 1) for i, m in second.items()
    }
    state = run.combine(hub(2), state, Replies(moved, 6))
    assert [c["ids"] for c in state["clusters"]] == [["a", "c", "e"], ["b"], ["d", "f"]]
    assert run.view(state, "b")["w"].tolist() == pytest.approx([-1, 1])
    assert run.view(state, "f")["w"].tolist() == pytest.approx([-0.95, -0.6])
    assert run.view(state, "c")["w"].tolist() == pytest.approx([1, 1])


def test_a_cluster_with_absent_clients_does_not_split() -> None:
    fed = type("Fed", (), {"seed": 0, "ids": tuple("abcd")})()
    run = clustered()
    replies = {i: (w(*m), 1) for i, m in zip("abc", MOVES, strict=False)}
    state = run.combine(hub(1), run.setup(fed), Replies(replies, 4))
    assert [c["ids"] for c in state["clusters"]] == [list("abcd")]


def test_no_split_during_the_warm_up_or_of_two_clients() -> None:
    fed = type("Fed", (), {"seed": 0, "ids": tuple("abcd")})()
    replies = Replies({i: (w(*m), 1) for i, m in zip("abcd", MOVES, strict=True)}, 4)
    for warm, clusters in ((20, 1), (19, 2)):
        run = clustered(warm=warm)
        assert len(run.combine(hub(20), run.setup(fed), replies)["clusters"]) == clusters
    pair = Replies({i: (w(*m), 1) for i, m in zip("ac", MOVES[::2], strict=True)}, 2)
    two = type("Fed", (), {"seed": 0, "ids": ("a", "c")})()
    assert len(clustered().combine(hub(1), clustered().setup(two), pair)["clusters"]) == 1


def test_relative_thresholds_are_scaled_by_the_first_round() -> None:
    fed = type("Fed", (), {"seed": 0, "ids": tuple("abcd")})()
    run = clustered(unit="relative", warm=1, eps2=0.8)
    for size in (0.01, 1, 100):
        replies = Replies({i: (w(*(size * x for x in m)), 1) for i, m in zip("abcd", MOVES, strict=True)}, 4)
        state = run.combine(hub(1), run.setup(fed), replies)
        assert state["longest"] == pytest.approx(1.004988 * size, rel=1e-5)
        assert len(run.combine(hub(2), run.setup(fed) | {"longest": state["longest"]}, replies)["clusters"]) == 2


def test_one_cluster_is_fedavg() -> None:
    task = normed_task()
    with federation(stack=False) as fed:
        state = federate(method("clustered", task, warm=99), fed, 3).state
    with federation(stack=False) as fed:
        assert same(state["clusters"][0]["w"], federate(method("fedavg", task), fed, 3).model)


def opposed() -> dict[str, Data]:
    """Six clients who tell odd digits from even ones; every second one calls them the other way round."""
    table, made = digits(), {}
    for k in range(6):
        part = table.take(torch.arange(200 * k, 200 * k + 200))
        y = (part["y"] + k) % 2
        rows = Rows.of(x=part["x"], y=y)
        made[f"c{k}"] = Data(
            rows.take(torch.arange(150)), rows.take(torch.arange(150, 170)), rows.take(torch.arange(170, 200))
        )
    return made


def test_clients_with_conflicting_labels_are_separated() -> None:
    settings = {"warm": 3, "eps1": 0.2, "eps2": 0.25, "gamma": 0.7}  # found on these very clients: not the defaults
    run = Clustered(task=mlp_task(), local=SGD(lr=0.2, batch=32), **settings)  # type: ignore[arg-type]
    with federation(opposed(), bench=None) as fed:
        result = federate(run, fed, 12)
        plain = federate(method("fedavg", mlp_task(), local=SGD(lr=0.2, batch=32)), fed, 12)
    assert [c["ids"] for c in result.state["clusters"]] == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert result.summary.client_accuracy.mean > plain.summary.client_accuracy.mean + 0.2
    assert any("2 clusters" in n.text for r in result.rounds for n in r.notes)


def test_needs_one_aggregator() -> None:
    with federation(topology="ring") as fed, pytest.raises(Mistake, match="one aggregator"):
        federate(method("clustered"), fed, 1)
    assert hdbscan(torch.eye(1)) == [-1]
