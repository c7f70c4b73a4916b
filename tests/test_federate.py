"""The training loop: what it records, when it evaluates and stops, what it calls best, and what the summary says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kilter.core import AtNodes, Data, Method, Node, Rows
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.records.codec import from_json, to_json
from kilter.records.run_folder import Store, read_clients, read_rounds, read_summary
from kilter.records.types import ClientReport, Round
from kilter.runtimes.evaluation import MOST_CURVES, SAMPLE, by_client, mean_of, sample_rows, spread
from kilter.runtimes.simulation import Simulation
from small import bench, digits, federation, method, mlp_task, normed_task, quadratic, quadratic_task, same, skewed


@dataclass(frozen=True, kw_only=True)
class Script(Method):
    """A method whose validation and test accuracies by round are written beforehand."""

    task: Any = None
    local: Any = None
    valid: tuple[float, ...] = ()
    test: tuple[float, ...] = ()

    def setup(self, fed: Any) -> dict[str, Tensor]:
        return {"round": torch.tensor(0)}

    def round(self, fed: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"round": state["round"] + 1}

    def predict(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        """100 rows of class 0 and x = 1 (validation) or 0 (test): as many right as the script says."""
        share = (self.valid if x[0] == 1 else self.test)[int(state["round"]) - 1]
        said = (torch.arange(len(x)) >= share * len(x)).long()
        return torch.nn.functional.one_hot(said, 2).float()


def scripted(valid: list[float], test: list[float], **options: Any) -> Any:
    def rows(x: float) -> Rows:
        return Rows.of(x=torch.full((100,), x), y=torch.zeros(100, dtype=torch.int64))

    task = mlp_task()
    task.names = {}
    fed = Simulation({"a": Data(rows(1), rows(1), rows(0)), "b": Data(rows(1), rows(1), rows(0))}, bench=rows(0))
    run = Script(task=task, valid=tuple(valid), test=tuple(test))
    return federate(run, fed, len(valid), **options)


def test_every_evaluated_round_records_the_metric_of_each_client() -> None:
    result = scripted([0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4], evaluate_every=2)
    curves = {r.round: r.by_client for r in result.rounds if r.by_client}
    assert curves == {2: {"a": 0.2, "b": 0.2}, 4: {"a": 0.4, "b": 0.4}}


def test_the_metric_of_each_of_many_clients_is_not_recorded() -> None:
    reports = {str(k): ClientReport(1, 1, test={"accuracy": 0.5}) for k in range(MOST_CURVES + 1)}
    script = Script(task=mlp_task())
    assert by_client(script, reports) == {}
    del reports["0"]
    assert len(by_client(script, reports)) == MOST_CURVES


def test_best_is_chosen_on_validation_never_on_test() -> None:
    summary = scripted([0.5, 0.8, 0.8, 0.7], [0.9, 0.2, 0.95, 0.6]).summary
    assert summary.chosen_by == "accuracy"
    assert summary.best.round == 2  # the first of the best
    assert summary.best.global_accuracy == pytest.approx(0.2)
    assert summary.best.valid["accuracy"] == pytest.approx(0.8)
    assert summary.last.round == 4
    assert summary.global_accuracy == summary.last.global_accuracy == pytest.approx(0.6)


def test_patience_counts_evaluations_without_improvement() -> None:
    valid, test = [0.5, 0.6, 0.6, 0.55, 0.9, 0.9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    stopped = scripted(valid, test, patience=2)
    assert (stopped.summary.rounds, stopped.summary.stopped_early) == (4, True)
    assert stopped.summary.best.round == 2
    assert stopped.summary.global_accuracy == pytest.approx(0.4)  # last is what was last, not best
    assert stopped.summary.last.round == 4
    patient = scripted(valid, test, patience=3)
    assert (patient.summary.rounds, patient.summary.stopped_early) == (6, False)
    assert scripted(valid, test, patience=2, evaluate_every=2).summary.rounds == 6
    assert scripted(valid, test).summary.rounds == 6


def test_a_run_that_stops_in_its_last_round_was_not_stopped_early() -> None:
    assert scripted([0.5, 0.4], [0, 0], patience=1).summary.stopped_early is False


def test_evaluates_when_asked_and_at_the_end() -> None:
    actual = scripted([0.5] * 7, [0.1] * 7, evaluate_every=3)
    assert [r.global_metrics is not None for r in actual.rounds] == [
        False,
        False,
        False,
        True,
        False,
        False,
        True,
        True,
    ]
    assert [r.round for r in actual.rounds] == list(range(8))


def test_a_stopped_run_is_examined_in_full() -> None:
    actual = scripted([0.5, 0.4, 0.4], [0.1] * 3, patience=1)
    assert actual.summary.last.scores.per_class is not None


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"rounds": -1}, {"rounds": 1, "evaluate_every": 0}])
def test_runs_that_cannot_be(bad: dict[str, int]) -> None:
    with pytest.raises(Mistake, match="at least one round"):
        federate(method("fedavg"), federation(), **bad)


def test_records_and_watch() -> None:
    seen: list[Round] = []
    actual = federate(method("fedavg", normed_task(), cohort=0.5), federation(), 3, watch=seen.append)
    assert seen == actual.rounds
    for k, record in enumerate(actual.rounds):
        assert record.round == k
        assert from_json(Round, to_json(record)) == record
        if k:
            assert len(record.participants) == 2
            assert record.loss > 0
            assert record.client["accuracy"].min <= record.client["accuracy"].mean
            assert "per_class" not in record.global_metrics
    assert actual.summary.bytes_up == sum(r.bytes_up for r in actual.rounds)


def test_the_summary_has_what_is_promised(tmp_path: Path) -> None:
    store = Store(tmp_path)
    actual = federate(method("fedprox"), federation(seed=3), 2, store=store)
    assert read_summary(tmp_path) == actual.summary
    summary = json.loads((tmp_path / "summary.json").read_text())
    promised = {"method", "rounds", "seed", "global_accuracy", "client_accuracy", "bytes_up", "bytes_down", "seconds"}
    assert promised <= summary.keys()
    assert [summary[k] for k in ("method", "rounds", "seed", "clients")] == ["fedprox", 2, 3, 4]
    assert set(summary["client_accuracy"]) == {"mean", "std", "min", "max", "worst_decile"}
    metrics = {"accuracy", "balanced_accuracy", "precision", "recall", "specificity", "f1", "top5", "loss"}
    assert metrics <= actual.summary.last.scores.metrics.keys()
    assert metrics <= actual.summary.last.client.keys()
    assert torch.tensor(actual.summary.last.scores.confusion).sum() == len(bench())
    assert read_rounds(tmp_path) == actual.rounds
    clients = read_clients(tmp_path)
    assert clients.last.clients == actual.clients
    assert clients.best is not None
    assert clients.best.clients == actual.best_clients
    assert list(clients.last.clients) == ["c0", "c1", "c2", "c3"]


def test_every_client_is_examined_also_those_not_sampled() -> None:
    clients = skewed(6)
    actual = federate(method("fedavg", cohort=0.2), federation(clients), 1)
    assert len(actual.rounds[1].participants) == 1
    reports = actual.clients
    assert {i: r.n_test for i, r in reports.items()} == {i: len(d.test) for i, d in clients.items()}
    assert actual.model is not None
    for i, data in clients.items():
        assert reports[i].test == method("fedavg").task.evaluate(actual.model, data.test)
        assert reports[i].valid == method("fedavg").task.evaluate(actual.model, data.valid)
        assert reports[i].own_test is None


def test_the_global_model_is_examined_on_the_common_test_set() -> None:
    run = method("fedavg")
    actual = federate(run, federation(), 2)
    assert actual.model is not None
    assert actual.summary.global_model == "global"
    assert (
        actual.summary.last.scores.metrics | run.task.evaluate(actual.model, bench())
        == actual.summary.last.scores.metrics
    )


def test_without_a_global_model_the_mean_over_clients_is_named_so() -> None:
    run = method("solo")
    fed = federation()
    actual = federate(run, fed, 1)
    scores = [run.task.evaluate(s["w"], bench())["accuracy"] for s in fed.states.values()]
    assert actual.summary.global_model == "mean of personal models"
    assert actual.summary.global_accuracy == pytest.approx(sum(scores) / 4)
    assert actual.summary.client_model == "personal"
    own = [run.task.evaluate(s["w"], fed.clients[i].test)["accuracy"] for i, s in fed.states.items()]
    assert actual.summary.client_accuracy.mean == pytest.approx(sum(own) / 4)
    reports = actual.clients
    assert all(r.test is None and r.own_test for r in reports.values())
    assert actual.model is None


def test_under_peers_every_node_is_judged_by_the_state_it_keeps() -> None:
    run = method("fedavg")
    fed = federation(topology="ring")
    actual = federate(run, fed, 2)
    assert isinstance(actual.state, AtNodes)
    assert actual.model is None
    assert actual.summary.global_model == "mean of personal models"
    scores = [run.task.evaluate(fed.states[i]["~pool"], bench())["accuracy"] for i in fed.ids]
    assert actual.summary.global_accuracy == pytest.approx(sum(scores) / 4)
    assert len(set(scores)) > 1


def test_validation_counts_by_rows() -> None:
    clients = skewed()
    run = method("fedavg")
    actual = federate(run, federation(clients), 1)
    assert actual.model is not None
    rows = torch.cat([d.valid.index for d in clients.values()])
    together = run.task.evaluate(actual.model, Rows(digits().tables, rows))
    assert actual.rounds[1].valid["accuracy"] == pytest.approx(together["accuracy"])


def test_no_validation_no_best_and_no_test_no_client_scores() -> None:
    empty = Rows(digits().tables, torch.empty(0, dtype=torch.int64))
    clients = {i: Data(d.train, empty, empty) for i, d in skewed().items()}
    actual = federate(method("fedavg"), federation(clients), 2, patience=1).summary
    assert actual.best is None
    assert actual.client_accuracy is None
    assert actual.global_accuracy is not None
    assert actual.rounds == 2


def test_no_common_test_set_no_global_score() -> None:
    actual = federate(method("fedavg"), federation(bench=None), 1).summary
    assert actual.global_accuracy is None
    assert actual.client_accuracy.mean > 0


def test_a_task_without_accuracy_is_best_where_its_loss_is_least() -> None:
    task = quadratic_task([5.0])
    clients = {"a": quadratic([1.0], [0.0]), "b": quadratic([1.0], [2.0])}
    from kilter.train import SGD

    actual = federate(method("fedavg", task, local=SGD(lr=0.5)), Simulation(clients), 3)
    losses = [r.valid["loss"] for r in actual.rounds[1:]]
    assert losses == sorted(losses, reverse=True)
    assert actual.summary.best.round == 3
    assert (actual.summary.chosen_by, actual.summary.directions["loss"]) == ("loss", "lower")
    assert actual.summary.global_accuracy is None


def test_the_saved_model_has_the_modules_names(tmp_path: Path) -> None:
    task = normed_task()
    actual = federate(method("fedavg", task), federation(), 1, store=Store(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert actual.model is not None
    assert saved.keys() == task.module.state_dict().keys()
    assert same(task.restore(tmp_path / "model.safetensors"), actual.model)
    torch.nn.Module.load_state_dict(task.module, saved)


def test_a_finished_run_can_be_asked_again_and_lengthened(tmp_path: Path) -> None:
    run = method("scaffold")
    with federation() as fed:
        store = Store(tmp_path)
        two = federate(run, fed, 2, store=store)
        again = federate(run, fed, 2, store=store)
        assert same(again.state, two.state)
        assert again.summary == two.summary
        longer = federate(run, fed, 4, store=store)
    straight = federate(run, federation(), 4)
    assert same(longer.state, straight.state)
    assert [r.loss for r in longer.rounds] == [r.loss for r in straight.rounds]


def test_stopping_is_remembered(tmp_path: Path) -> None:
    valid = [0.5, 0.4, 0.4, 0.9]
    first = scripted(valid, [0.1] * 4, patience=1, store=(store := Store(tmp_path)))
    again = scripted(valid, [0.1] * 4, patience=1, store=store)
    assert first.summary == again.summary
    assert again.summary.rounds == 2


def test_node_states_are_not_examined_into_change() -> None:
    fed = federation()
    run = method("fedbn", normed_task())
    federate(run, fed, 2, evaluate_every=2)
    once = {i: dict(s) for i, s in fed.states.items()}
    federate(run, fed, 2, evaluate_every=1)
    assert same(once, fed.states)


# Spread over clients -------------------------------------------------------------------------------------------------


def test_spread() -> None:
    values = [k / 100 for k in range(25)]
    actual = spread(values[::-1])
    assert actual is not None
    assert actual.worst_decile == pytest.approx(0.005)  # the mean of the worst two of 25
    assert (actual.min, actual.max, actual.mean) == (0, 0.24, pytest.approx(0.12))
    assert actual.std == pytest.approx(math.sqrt(sum((v - 0.12) ** 2 for v in values) / 25))
    assert spread([0.3, 0.9]).worst_decile == 0.3
    assert spread(values, better="lower").worst_decile == pytest.approx(0.235)  # the two largest
    assert spread([0.3, None, math.nan, 0.9]).mean == pytest.approx(0.6)
    assert spread([]) is None


def test_mean_of_leaves_out_who_has_none() -> None:
    reports = [ClientReport(0, 0, own_bench={"a": 1.0}), ClientReport(0, 0), ClientReport(0, 0, own_bench={"a": 3.0})]
    assert mean_of(reports) == {"a": 2.0}
    assert mean_of([ClientReport(0, 0)]) is None


def test_sample_is_a_fixed_choice_over_all_rows() -> None:
    rows = Rows.of(y=torch.arange(3 * SAMPLE))
    seen = sample_rows(rows, full=False)
    assert seen is not None
    assert len(seen) == SAMPLE == len(seen.index.unique())
    assert (seen.index[0], seen.index[-1]) == (0, 3 * SAMPLE - 1)
    assert sample_rows(rows, full=True) is rows
    assert sample_rows(None, full=False) is None


def test_personal_is_where_it_is_overridden() -> None:
    from kilter.runtimes.evaluation import is_personal

    assert [is_personal(method(n)) for n in ("fedavg", "fedbn", "solo")] == [False, True, True]
    assert method("fedavg").personal(Node("a", skewed()["c0"]), {}, torch.ones(1)) is None
