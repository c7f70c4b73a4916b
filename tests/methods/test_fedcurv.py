"""FedCurv: the pull both ways, Fisher from single rows, oneself left out, and where it becomes FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import hub, is_fedavg, play

from kilter.core import Node, Params, Replies
from kilter.methods.fedcurv import FedCurv
from kilter.params import dot, sub
from kilter.tasks import Task
from kilter.train import SGD
from small import linear_task, near, normed_task, same, skewed


def curv(task: Task | None = None, **settings: Any) -> FedCurv:
    return FedCurv(task=task or normed_task(), local=SGD(lr=0.1, batch=16), **settings)


def w(*numbers: float) -> Params:
    return {"w": torch.tensor(numbers, dtype=torch.float32)}


def test_both_forms_of_the_penalty_agree() -> None:
    theta, (i1, t1), (i2, t2) = w(0.5, 1), (w(2, 0.5), w(1, 0)), (w(1, 3), w(0, 2))
    apart = sum(dot({"w": i["w"] * (theta["w"] - t["w"])}, sub(theta, t)).item() for i, t in ((i1, t1), (i2, t2)))
    u = {"w": i1["w"] + i2["w"]}
    v = {"w": i1["w"] * t1["w"] + i2["w"] * t2["w"]}
    const = (i1["w"] * t1["w"] ** 2 + i2["w"] * t2["w"] ** 2).sum().item()
    assert apart == pytest.approx(4.25)
    assert curv(linear_task([0.0, 0.0])).penalty(theta, u, v).item() + const == pytest.approx(4.25)


@pytest.mark.parametrize(("rounds", "lam"), [(1, 5.0), (3, 0.0)])
def test_the_first_round_and_lam_zero_are_fedavg(rounds: int, lam: float) -> None:
    assert is_fedavg("fedcurv", rounds, lam=lam, task=normed_task())


def test_a_single_client_has_no_penalty() -> None:
    assert is_fedavg("fedcurv", 3, clients={"a": skewed()["c0"]}, lam=5.0)
    assert not is_fedavg("fedcurv", 2, lam=5.0)


def played(run: FedCurv) -> tuple[dict[str, Any], dict[str, Node], dict[str, Any]]:
    """Round 1 of three nodes."""
    state = run.setup(type("Fed", (), {"seed": 0})())
    nodes = {i: Node(i, d, round=1) for i, d in list(skewed().items())[:3]}
    replies = {i: play(run.train(n, state))[0] for i, n in nodes.items()}
    return state, nodes, replies


def test_a_node_subtracts_its_own_part() -> None:
    run = curv(lam=0.1)
    state, nodes, replies = played(run)
    full = run.combine(hub(1), state, Replies(replies, 3))
    others = run.combine(hub(1), state, Replies({i: replies[i] for i in ("c1", "c2")}, 3))
    for after in (full, others):  # c0 is in the sums, or its reply was lost
        nodes["c0"].round = 2
        kept = dict(nodes["c0"].state)
        _, (fit,), _ = play(run.train(nodes["c0"], after))
        nodes["c0"].state = kept
        assert near(fit.ctx[0], others["U"], 1e-6)
        assert near(fit.ctx[1], others["V"], 1e-6)


def test_a_node_subtracts_nothing_from_older_sums() -> None:
    """Round 2 came to nothing at the aggregator, whose sums are round 1's; the node has moved on."""
    run = curv(lam=0.1)
    state, nodes, replies = played(run)
    after = run.combine(hub(1), state, Replies(replies, 3))
    nodes["c0"].round = 2
    play(run.train(nodes["c0"], after))
    nodes["c0"].round = 3
    _, (fit,), _ = play(run.train(nodes["c0"], after))
    assert same(fit.ctx, (after["U"], after["V"]))


def test_models_are_weighted_and_curvatures_summed() -> None:
    run = curv(linear_task([0.0]))
    replies = {"a": (w(1), w(2), w(2), 1), "b": (w(5), w(3), w(15), 3)}
    actual = run.combine(hub(4), {"U": w(0), "V": w(0)}, Replies(replies, 2))
    assert (actual["w"]["w"].item(), actual["U"]["w"].item(), actual["V"]["w"].item()) == (4, 5, 17)
    assert (actual["whose"], actual["round"]) == (["a", "b"], 4)
