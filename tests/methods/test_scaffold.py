"""SCAFFOLD: known answers, control variates, and the optimum that FedAvg misses."""

from __future__ import annotations

import pytest
import torch
from acting import at_node, run, states

from kilter.core import Data, Node, Replies
from kilter.federate import federate
from kilter.params import average, mean, weights
from kilter.runtimes.simulation import Simulation
from kilter.train import SGD
from small import (
    constant,
    linear_task,
    method,
    mlp_task,
    near,
    normed_task,
    quadratic,
    quadratic_task,
    skewed,
)


def test_known_answer() -> None:
    """x = (.5, .5), c = (.1, .1), c_i = (.3, -.1), eta .1, g = (.2, .4), (.1, .3)."""
    x, c = {"w": torch.tensor([0.5, 0.5])}, {"w": torch.tensor([0.1, 0.1])}
    scaffold = method("scaffold", linear_task([0.5, 0.5]), local=SGD(lr=0.1, batch=1))
    data = constant([[0.2, 0.4], [0.1, 0.3]])
    (y, dc), node = at_node(scaffold, data, (x, c), {"c": {"w": torch.tensor([0.3, -0.1])}}, round=1)
    assert near(y, {"w": torch.tensor([0.51, 0.39])})
    assert near(node.state["c"], {"w": torch.tensor([0.15, 0.35])})
    assert near(dc, {"w": torch.tensor([-0.15, 0.45])})
    hub = Node("server", data)
    moved, c_new = scaffold.combine(hub, (x, c), Replies({"a": (y, dc)}, of=3))  # type: ignore[attr-defined]
    assert near(moved, y)
    assert near(c_new, {"w": torch.tensor([0.1 - 0.05, 0.1 + 0.15])})


@pytest.mark.parametrize("topology", ["star", "rotating", "full"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_c_is_the_mean_of_the_c_i(topology: str, momentum: float) -> None:
    plan = SGD(lr=0.05, batch=16, momentum=momentum, decay=0.9)
    result, kept = states("scaffold", skewed(), 3, local=plan, topology=topology)
    c = kept["c0"]["~pool"][1] if topology == "full" else result.state[1]
    assert near(c, mean(kept[i]["c"] for i in skewed()), 1e-5)
    assert max(float(v.abs().max()) for v in c.values()) > 1e-3


def test_c_stays_the_mean_over_all_clients_with_partial_participation() -> None:
    clients = skewed(6)
    result, kept = states("scaffold", clients, 5, cohort=0.5)
    zero = {k: torch.zeros_like(v) for k, v in weights(mlp_task().init(0)).items()}
    assert near(result.state[1], mean(kept.get(i, {}).get("c", zero) for i in clients), 1e-5)


def test_identical_clients_give_fedavg() -> None:
    """Full batches, so that all do the same."""
    one = skewed()["c3"]
    clients = {f"c{k}": one for k in range(3)}
    plan = SGD(lr=0.1, batch=0, epochs=3)
    assert near(run("scaffold", clients, 4, local=plan).state[0], run("fedavg", clients, 4, local=plan).state, 1e-5)


def test_the_first_round_is_the_plain_mean_of_local_training() -> None:
    clients = skewed()
    actual = run("scaffold", clients).state[0]
    _, kept = states("solo", clients, 1)
    assert near(actual, mean(s["w"] for s in kept.values()), 1e-5)
    assert not near(actual, average((s["w"], len(clients[i].train)) for i, s in kept.items()), 1e-3)  # not by n_k


def test_server_learning_rate() -> None:
    clients = {"a": constant([[1.0]]), "b": constant([[3.0]])}
    for rate, expected in [(1.0, -2.0), (0.5, -1.0), (0.0, 0.0)]:
        actual = run("scaffold", clients, task=linear_task([0.0]), local=SGD(lr=1.0), server_lr=rate)
        assert actual.state[0]["w"].item() == pytest.approx(expected)


def test_buffers_are_not_corrected() -> None:
    result, kept = states("scaffold", skewed(), 2, normed_task())
    assert all(not k.startswith("~") for k in [*result.state[1], *kept["c0"]["c"]])
    assert any(k.startswith("~") for k in result.state[0])


def ten_quadratics() -> tuple[dict[str, Data], list[float]]:
    """Ten clients with curvatures and centres of their own, and where their mean loss is least."""
    rng = torch.Generator().manual_seed(3)
    a = 0.2 + 1.8 * torch.rand(10, 2, generator=rng)
    b = 4 * torch.randn(10, 2, generator=rng)
    best = (a * b).sum(0) / a.sum(0)
    return {f"q{k}": quadratic(a[k].tolist(), b[k].tolist()) for k in range(10)}, best.tolist()


@pytest.mark.parametrize(("cohort", "momentum", "rounds"), [(1.0, 0.0, 20), (1.0, 0.5, 20), (0.5, 0.0, 60)])
def test_it_reaches_the_optimum_of_ten_quadratics_and_fedavg_does_not(
    cohort: float, momentum: float, rounds: int
) -> None:
    clients, best = ten_quadratics()
    plan = SGD(lr=0.2 * (1 - momentum), epochs=5, momentum=momentum)
    distance = {}
    for name in ("scaffold", "fedavg"):
        with Simulation(clients) as fed:
            state = federate(
                method(name, quadratic_task([0.0, 0.0]), local=plan, cohort=cohort), fed, rounds, evaluate_every=rounds
            ).state
        w = (state[0] if name == "scaffold" else state)["w"]
        distance[name] = float((w - torch.tensor(best)).norm())
    assert distance["scaffold"] < 1e-3
    assert distance["fedavg"] > 0.1
