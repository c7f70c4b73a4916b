"""The books of a round: what every letter cost, who paid, how training went."""

from __future__ import annotations

from typing import Any

import pytest

from kilter.federate import federate
from kilter.records import wire
from kilter.runtimes.simulation import Simulation
from kilter.train import SGD
from small import constant, federation, linear_task, method, mlp_task, normed_task, skewed


def big_task() -> Any:
    return mlp_task(width=256)


def books(name: str, **options: Any) -> tuple[Any, dict[str, Any], Simulation]:
    fed = federation(**options)
    result = federate(method(name, big_task(), local=SGD(lr=0.01, batch=0)), fed, 2)
    return result, result.rounds[2], fed


def test_fedavg_costs_a_model_each_way() -> None:
    result, record, fed = books("fedavg")
    down = wire.size(result.model)
    up = {i: wire.size((result.model, len(d.train))) for i, d in fed.clients.items()}
    assert record.bytes_by_node == {i: (up[i], down) for i in fed.ids}
    assert record.bytes_down == 4 * down
    assert record.bytes_up == sum(up.values())
    assert 1 <= down / (4 * big_task().size()) < 1.01  # 4 bytes a float, and a header
    assert result.summary.bytes_up == 2 * sum(up.values())
    assert result.rounds[0].bytes_up == 0


def test_fedprox_costs_what_fedavg_costs_and_scaffold_twice() -> None:
    fedavg, fedprox, scaffold = (books(name)[1] for name in ("fedavg", "fedprox", "scaffold"))
    for way in ("bytes_up", "bytes_down"):
        assert getattr(fedprox, way) == getattr(fedavg, way)
        assert getattr(scaffold, way) / getattr(fedavg, way) == pytest.approx(2, rel=0.01)


def test_solo_costs_nothing() -> None:
    result, record, _ = books("solo")
    assert (result.summary.bytes_up, result.summary.bytes_down) == (0, 0)
    assert record.bytes_by_node == {}
    assert record.participants == ["c0", "c1", "c2", "c3"]


def test_pooled_pays_for_the_data_once() -> None:
    result, record, fed = books("pooled")
    rows = {i: wire.size(d.train.batch()) for i, d in fed.clients.items()}
    assert result.rounds[0].bytes_by_node == {i: (n, 0) for i, n in rows.items()}
    assert record.bytes_up == record.bytes_down == 0


def test_fedbn_does_not_send_batchnorm() -> None:
    fed = federation()
    task = normed_task()
    result = federate(method("fedbn", task), fed, 1)
    shared = {k: v for k, v in task.init(0).items() if "body.2" not in k}
    assert result.rounds[1].bytes_by_node["c0"] == (
        wire.size((shared, len(fed.clients["c0"].train))),
        wire.size(shared),
    )


def test_a_rotating_aggregator_neither_pays_for_itself_nor_forgets_to_hand_over() -> None:
    result, record, fed = books("fedavg", topology="rotating")
    model = wire.size(result.model)
    up = {i: wire.size((result.model, len(d.train))) for i, d in fed.clients.items()}
    # Round 2: c0 hands the state to c1, who sends it to the others and takes their models.
    assert record.bytes_by_node == {
        "c0": (model + up["c0"], model),
        "c1": (3 * model, model + up["c0"] + up["c2"] + up["c3"]),
        "c2": (up["c2"], model),
        "c3": (up["c3"], model),
    }
    first = result.rounds[1].bytes_by_node
    assert first["c0"] == (3 * model, up["c1"] + up["c2"] + up["c3"])  # nothing to take over yet


def test_peers_pay_by_neighbour() -> None:
    _, record, fed = books("fedavg", topology="ring")
    model = big_task().init(0)
    cost = {i: wire.size((model, len(d.train))) for i, d in fed.clients.items()}
    assert record.bytes_by_node["c0"] == (2 * cost["c0"], cost["c1"] + cost["c3"])


def test_evaluation_is_booked_apart() -> None:
    _, record, _ = books("fedavg")
    assert record.evaluation_bytes_down > 4 * 4 * big_task().size()
    assert 0 < record.evaluation_bytes_up < 20_000
    fed = federation()
    every = federate(method("fedavg"), fed, 4, evaluate_every=2).rounds
    assert [r.evaluation_bytes_up > 0 for r in every] == [False, False, True, False, True]
    assert len({r.bytes_up for r in every[1:]}) == 1


def test_a_cohort_pays_alone() -> None:
    fed = federation(skewed(6))
    for record in federate(method("fedavg", cohort=0.5), fed, 3).rounds[1:]:
        assert len(record.participants) == 3
        assert list(record.bytes_by_node) == record.participants


def test_steps_and_loss_are_summed_over_fits() -> None:
    clients = {"a": constant([[1.0]] * 4), "b": constant([[3.0]] * 2)}
    run = method("fedavg", linear_task([1.0]), local=SGD(lr=1e-30, batch=1))
    record = federate(run, Simulation(clients), 1).rounds[1]
    assert record.steps == 6
    assert record.loss == pytest.approx((4 * 1 + 2 * 3) / 6)
    assert set(record.fit_seconds) == {"train"}
