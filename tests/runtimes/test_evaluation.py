"""How clients fare on the common test set: with their own shares of the classes, and as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kilter import federate
from kilter.methods.fedavg import FedAvg
from kilter.runtimes import evaluation
from kilter.runtimes.step_runner import POOL, StepFailed
from kilter.train import SGD
from small import bench, federation, method, mlp_task, quadratic, quadratic_task


def by_hand(outputs: torch.Tensor, mine: torch.Tensor) -> float:
    """Row by row: a test row of class c weighs (my share of c) / (test rows of c)."""
    y = bench()["y"]
    share = torch.bincount(mine, minlength=10).double() / len(mine)
    weight = share[y] / torch.bincount(y, minlength=10)[y]
    return float((weight * (outputs.argmax(1) == y)).sum())


def test_a_global_model_is_weighed_by_every_clients_classes() -> None:
    with federation() as fed:
        actual = federate(m := method("fedavg"), fed, 2)
    outputs = m.task.predict(actual.model, bench()["x"])
    for i, report in actual.clients.items():
        assert report.local == pytest.approx(by_hand(outputs, fed.clients[i].train["y"]))
        assert report.common == pytest.approx(actual.summary.global_accuracy)
    values = [r.local for r in actual.clients.values()]
    spread = actual.summary.local_accuracy
    assert (spread.min, spread.max) == pytest.approx((min(values), max(values)))
    assert spread.mean == pytest.approx(sum(values) / len(values))
    assert actual.rounds[-1].bench["local"] == spread == actual.summary.last.bench["local"]


@pytest.mark.parametrize(("name", "topology"), [("solo", "star"), ("fedavg", "ring"), ("slfed", "full")])
def test_clients_with_models_of_their_own_are_examined_each(name: str, topology: str) -> None:
    with federation(topology=topology) as fed:
        actual = federate(m := method(name), fed, 1)
    summary = actual.summary
    assert summary.common_accuracy.mean == pytest.approx(summary.global_accuracy)
    if name == "solo":
        for i, state in fed.states.items():
            outputs = m.task.predict(state["w"], bench()["x"])
            expected = by_hand(outputs, fed.clients[i].train["y"])
            assert actual.clients[i].local == pytest.approx(expected)


def test_without_classes_or_a_common_test_set_there_is_no_such_measure() -> None:
    with federation(bench=None) as fed:
        assert federate(method("fedavg"), fed, 1).summary.local_accuracy is None
    clients = {"a": quadratic([1.0], [0.0])}
    with federation(clients, bench=clients["a"].test) as fed:
        assert federate(method("fedavg", quadratic_task([1.0])), fed, 1).summary.local_accuracy is None


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows FedAvg's model is shown at a time, from now on."""
    shown: list[int] = []
    predict = FedAvg.predict

    def counted(self: FedAvg, state: Any, x: torch.Tensor) -> torch.Tensor:
        shown.append(len(x))
        return predict(self, state, x)

    monkeypatch.setattr(FedAvg, "predict", counted)
    return shown


@pytest.mark.parametrize("most", [1000, 60, 1])
def test_nodes_are_examined_together_as_each_would_be_alone(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def run(**options: Any) -> dict[str, Any]:
        with federation(6, bench=None, **options) as fed:
            return federate(method("fedavg"), fed, 1).clients

    alone = run(stack=False)
    monkeypatch.setattr(evaluation, "BATCH_BYTES", most * bench()["x"][0].nbytes)
    shown = seen_rows(monkeypatch)
    actual = run()
    rows = [n for r in actual.values() for n in (r.n_test, r.n_valid) if n]
    assert sum(shown) == sum(rows)
    assert all(n <= most or n in rows for n in shown)
    assert len(shown) == len(rows) if most == 1 else len(shown) < len(rows)
    for i, report in alone.items():
        assert actual[i].test == pytest.approx(report.test, abs=1e-6)
        assert actual[i].valid == pytest.approx(report.valid, abs=1e-6)
    assert run(workers=2) == actual


def test_states_that_nodes_keep_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers who have not yet trained may hold one object or equal ones, by how states travelled: it must not show."""
    shown = seen_rows(monkeypatch)
    with federation(8, topology="ring", bench=None) as fed:
        actual = federate(replace(method("fedavg"), cohort=0.3), fed, 1).clients
    assert len({id(state[POOL]) for state in fed.states.values()}) < 8  # some hold one object
    assert sorted(shown) == sorted(n for r in actual.values() for n in (r.n_test, r.n_valid) if n)


def test_an_error_while_examined_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(FedAvg, "predict", broken)
    for workers in (1, 2):
        with (
            federation(bench=None, workers=workers) as fed,
            pytest.raises(StepFailed, match="RuntimeError: no such layer"),
        ):
            federate(method("fedavg"), fed, 1)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("part", [40, 120, 1000])
def test_processes_share_the_common_test_set(monkeypatch: pytest.MonkeyPatch, workers: int, part: int) -> None:
    """More parts than nodes, fewer, and one: always all rows in order, and no traffic."""
    monkeypatch.setattr(evaluation, "PART", part)
    m = method("fedavg")
    state = m.task.init(0)
    with federation(workers=workers) as fed:
        fed.bind(m)
        actual = fed.look(m, state)
        record = fed.ledger.close()
    assert actual is not None
    assert torch.equal(actual, torch.cat([m.predict(state, x) for x in bench()["x"].split(part)]))
    assert not any(value for name, value in vars(record).items() if "bytes" in name)


def test_an_error_in_a_part_is_told_after_all_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FedAvg):
        def predict(self, state, x):  # type: ignore[no-untyped-def]
            if not state:
                raise ValueError("nothing to predict with")
            return super().predict(state, x)

    monkeypatch.setattr(evaluation, "PART", 40)
    m = Broken(task=mlp_task(), local=SGD(lr=0.1))
    with federation(workers=2) as fed:
        fed.bind(m)
        with pytest.raises(StepFailed, match="nothing to predict with"):
            fed.look(m, {})
        assert fed.look(m, m.task.init(0)) is not None


def test_a_site_without_a_common_test_set_does_not_look() -> None:
    m = method("fedavg")
    with federation(bench=None) as fed:
        fed.bind(m)
        done = fed.run_here(":look", 0, {"a": {"state": {}, "parts": {"a": [0]}}}, {"a": {}})
    assert "there is none here" in str(done["a"][0].error)
