"""A run says what did not happen: refused replies, failed clients, metrics that are not numbers, settings that changed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kilter.cli import app
from kilter.core import Method, Node, step
from kilter.errors import Mistake
from kilter.federate import NothingTrained, federate
from kilter.methods.fedavg import FedAvg
from kilter.metrics import lower_is_better
from kilter.records.run_folder import Store, read_rounds, read_summary
from kilter.runtimes.step_runner import StepFailed
from kilter.tasks import Task
from kilter.train import SGD
from small import federation, method, mlp_task, near, skewed, timeless

RUN = ["run", "--data", "digits", "--rows", "300", "--clients", "3", "--model", "linear", "--workers", "1"]


# Directions of metrics -----------------------------------------------------------------------------------------------


def test_the_worst_tenth_is_the_worst_where_lower_is_better() -> None:
    client = federate(method("fedavg"), federation(), 1).summary.last.client
    for name in ("loss", "calibration_error"):
        assert client[name].worst_decile == client[name].max  # four clients: the worst tenth is one of them
    assert client["accuracy"].worst_decile == client["accuracy"].min


def test_users_metrics_have_directions_too() -> None:
    def mae(outputs: torch.Tensor, y: torch.Tensor) -> float:
        return float((outputs.argmax(1) - y).abs().double().mean())

    @lower_is_better
    def misses(outputs: torch.Tensor, y: torch.Tensor) -> float:
        return float((outputs.argmax(1) != y).double().mean())

    def hits(outputs: torch.Tensor, y: torch.Tensor) -> float:
        return 1 - misses(outputs, y)

    task = Task(lambda: mlp_task().module, metrics={"mae": mae, "misses": misses, "hits": hits})
    summary = federate(FedAvg(task=task, local=SGD(lr=0.1)), federation(), 2).summary
    assert summary.directions == {"loss": "lower", "mae": "lower", "misses": "lower", "hits": "higher"}
    over = summary.last.client
    assert (over["mae"].worst_decile, over["misses"].worst_decile) == (over["mae"].max, over["misses"].max)
    assert over["hits"].worst_decile == over["hits"].min


# Replies that are refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["star", "rotating", "ring"])
def test_a_run_without_a_valid_reply_says_so(topology: str) -> None:
    with federation(topology=topology) as fed, pytest.warns(UserWarning, match="No reply of any client could be used"):
        summary = federate(method("fedavg", local=SGD(lr=1e30)), fed, 2).summary
    assert summary.outcome == "no valid replies"
    assert any(notice.what == "a reply was refused: it is not finite" for notice in summary.notices)


def test_one_valid_reply_is_enough() -> None:
    def others_away(seed: int, round: int, node: str, step: str) -> str | None:
        return "away" if node != "c0" or round == 1 else None

    assert federate(method("fedavg"), federation(faults=others_away), 2).summary.outcome == "trained"
    assert federate(method("solo"), federation(), 1).summary.outcome == "trained"  # solo sends nothing


@pytest.mark.parametrize("words", [[], ["--topology", "ring"], ["--method", "scaffold"]])
def test_the_command_line_exits_with_2_when_nothing_was_trained(tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(
        app, [*RUN, "--rounds", "2", "--model", "mlp:8", "--lr", "1e30", "--out", str(out), *words]
    )
    assert isinstance(done.exception, NothingTrained)  # main() prints it and exits with 2
    assert "the model is still the initial one" in str(done.exception)
    assert read_summary(out).outcome == "no valid replies"
    for name in ("summary.json", "rounds.jsonl", "clients.json"):
        text = (out / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        json.loads(text.splitlines()[-1] if name == "rounds.jsonl" else text)
    assert any("training loss was not a finite number" in n.what for r in read_rounds(out) for n in r.notices)


def test_metrics_that_are_not_numbers_are_recorded_as_none_with_a_notice(tmp_path: Path) -> None:
    class Broken(FedAvg):
        def predict(self, state: Any, x: torch.Tensor) -> torch.Tensor:
            return super().predict(state, x) * math.nan

    run = Broken(task=mlp_task(), local=SGD(lr=0.1))
    result = federate(run, federation(), 1, store=Store(tmp_path))
    assert result.summary.last.scores is not None
    assert result.summary.last.scores.metrics["loss"] is None
    assert "loss" not in result.summary.last.client
    assert result.clients["c0"].test is not None
    assert result.clients["c0"].test["loss"] is None  # the report itself counts: it is not refused
    assert result.summary.failures == 0
    assert sum("a metric was not a finite number" in notice.what for notice in result.summary.notices) == 2
    assert "NaN" not in (tmp_path / "summary.json").read_text() + (tmp_path / "rounds.jsonl").read_text()


# Things that did not happen ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Grumble(Method):
    """Says in every step that something did not happen, and at the end that something never did."""

    def setup(self, fed: Any) -> Any:
        return fed.pool(self.train, self.combine, self.task.init(fed.seed))

    def round(self, fed: Any, state: Any) -> Any:
        return fed.pool(self.train, self.combine, state)

    @step
    def train(self, node: Node, w: Any) -> Any:
        node.record("double the round", 2 * node.round)
        if node.id == "c1":
            node.notice("did not train")
        if node.id == "c2":
            node.notes += [{"series": "x", "value": math.inf, "at": 1}, {"listens": [1]}, {"whatever": 1}]
        return w

    @step
    def combine(self, hub: Node, w: Any, replies: Any) -> Any:
        hub.note(f"{len(replies)} replies")
        return w

    def never_happened(self, state: Any) -> list[str]:
        return ["never got going"]


@pytest.mark.parametrize("workers", [1, 2])
def test_notices_are_counted_over_the_run(workers: int) -> None:
    with federation(workers=workers) as fed:
        result = federate(Grumble(task=mlp_task(), local=SGD()), fed, 2)
    notices = {notice.what: notice for notice in result.summary.notices}
    assert (notices["did not train"].count, notices["did not train"].rounds) == (3, [0, 1, 2])
    assert notices["did not train"].nodes == ["c1"]
    assert notices["never got going"].rounds == []
    assert notices["a value of 'x' was not a finite number"].count == 3
    assert notices["a note could not be read"].count == 6
    assert [(p.at, p.value) for p in result.rounds[2].series] == [(2, 4.0)] * 4
    assert [n.text for n in result.rounds[1].notes] == ["4 replies"]


def test_the_command_line_shows_what_did_not_happen(tmp_path: Path) -> None:
    settings = ["--set", "gan_epochs=1", "--set", "pictures=4", "--topology", "full", "--rounds", "1", "--lr", "0.01"]
    done = CliRunner().invoke(app, [*RUN, "--method", "slfed", "--out", str(tmp_path / "run"), *settings])
    assert done.exit_code == 0, done.output
    assert "Not as intended" in done.output
    assert "too few contributors to hide one in the sum: keeps its own model: " in done.output


@pytest.mark.parametrize(
    ("name", "what"), [("clustered", "the clusters never split"), ("cm", "never divided into clusters")]
)
def test_clusters_that_never_were_are_noticed(name: str, what: str) -> None:
    summary = federate(method(name, mlp_task(), warm=9), federation(), 2).summary
    assert any(what in notice.what for notice in summary.notices)


# One client's error ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stumble(FedAvg):
    """FedAvg whose training raises an error at some clients."""

    where: tuple[str, ...] = ()

    @step
    def train(self, node: Node, w: Any) -> Any:
        if node.id in self.where:
            raise ZeroDivisionError("by these rows")
        return (yield from FedAvg.train(self, node, w))


@pytest.mark.parametrize("workers", [1, 2])
def test_one_clients_error_is_its_failure_and_the_run_goes_on(workers: int) -> None:
    with federation(workers=workers) as fed:
        result = federate(Stumble(task=mlp_task(), local=SGD(lr=0.1), where=("c2",)), fed, 2)
    for record in result.rounds[1:]:
        (failure,) = record.failures
        assert (failure.node, failure.step, failure.kind) == ("c2", "train", "error")
        assert failure.reason.startswith("ZeroDivisionError: by these rows (test_honest_results.py, line")
        assert record.participants == ["c0", "c1", "c3"]
    others = {i: data for i, data in skewed().items() if i != "c2"}
    without = federate(method("fedavg", mlp_task(), local=SGD(lr=0.1)), federation(others), 2)
    assert near(result.state, without.state, 1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_at_every_client_ends_the_run_with_one_sentence(workers: int) -> None:
    run = Stumble(task=mlp_task(), local=SGD(lr=0.1), where=("c0", "c1", "c2", "c3"))
    with federation(workers=workers) as fed, pytest.raises(StepFailed) as actual:
        federate(run, fed, 2)
    assert str(actual.value).startswith(
        "The step 'train' failed at every client: ZeroDivisionError: by these rows (test_"
    )
    assert "\n" not in str(actual.value)
    assert actual.value.__cause__ is not None  # with its traceback


# Resuming under other settings ---------------------------------------------------------------------------------------


def run_command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def edited(folder: Path, **changes: tuple[str, str]) -> None:
    text = (folder / "experiment.toml").read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    (folder / "experiment.toml").write_text(text)


def test_resume_refuses_an_edited_experiment_and_names_the_fields(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_command(*RUN, "--rounds", "1", "--out", str(folder))
    (folder / "summary.json").unlink()
    edited(folder, a=("lr = 0.1", "lr = 0.5"), b=("seed = 0", "seed = 3"))
    with pytest.raises(Mistake, match=r"changed after it started \(local\.lr, seed\): restore experiment\.toml"):
        run_command("resume", str(folder))
    edited(folder, a=("lr = 0.5", "lr = 0.1"), b=("seed = 3", "seed = 0"), c=("rounds = 1", "rounds = 2"))
    with pytest.raises(Mistake, match=r"\(rounds\).* use `kilter resume RUN --rounds N`"):
        run_command("resume", str(folder))
    edited(folder, c=("rounds = 2", "rounds = 1"))
    assert "fedavg, 1 round," in run_command("resume", str(folder))


@pytest.mark.parametrize("words", [[], ["--evaluate-every", "3"], ["--method", "scaffold", "--topology", "ring"]])
def test_an_extended_run_is_identical_to_a_longer_one(tmp_path: Path, words: list[str]) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    run_command(*RUN, *words, "--rounds", "5", "--out", str(long))
    run_command(*RUN, *words, "--rounds", "2", "--out", str(short))
    assert "finished. Extend it with --rounds" in run_command("resume", str(short))
    run_command("resume", str(short), "--rounds", "5")
    assert timeless(read_summary(short)) == timeless(read_summary(long))
    assert list(map(timeless, read_rounds(short))) == list(map(timeless, read_rounds(long)))
    assert (short / "clients.json").read_text() == (long / "clients.json").read_text()
    assert "rounds = 5" in (short / "experiment.toml").read_text()
    assert "This run is finished" in run_command("resume", str(short))  # also without --rounds now


def test_a_run_that_cannot_be_extended_says_why(tmp_path: Path) -> None:
    run_command(*RUN, "--rounds", "2", "--out", str(tmp_path / "a"))
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    with pytest.raises(Mistake, match="already has 2 rounds"):
        run_command("resume", str(tmp_path / "a"), "--rounds", "1")
    assert {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()} == before
    run_command(*RUN, "--rounds", "2", "--out", str(tmp_path / "b"), "--method", "fedrep", "--model", "mlp:8")
    with pytest.raises(Mistake, match="FedRep depends on the number of rounds"):
        run_command("resume", str(tmp_path / "b"), "--rounds", "4")
    assert (tmp_path / "b" / "summary.json").exists()


def test_an_extension_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    run_command(*RUN, "--rounds", "2", "--out", str(folder))
    train = FedAvg.round

    def stop(self: FedAvg, fed: Any, state: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FedAvg, "round", stop)
    assert CliRunner().invoke(app, ["resume", str(folder), "--rounds", "4"]).exit_code == 130
    assert not (folder / "summary.json").exists()
    monkeypatch.setattr(FedAvg, "round", train)
    assert "fedavg, 4 rounds" in run_command("resume", str(folder))
    run_command(*RUN, "--rounds", "4", "--out", str(tmp_path / "whole"))
    assert timeless(read_summary(folder)) == timeless(read_summary(tmp_path / "whole"))


# Accelerations that fall back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_cannot_be_stacked_is_noticed(workers: int) -> None:
    class Looking(FedAvg):
        def loss(self, w: Any, batch: Any, _: Any) -> torch.Tensor:
            loss = self.task.loss(w, batch)
            assert float(loss.detach()) > 0  # the value of a stacked tensor cannot be read
            return loss

    with federation(workers=workers) as fed:
        summary = federate(Looking(task=mlp_task(), local=SGD(lr=0.1)), fed, 1).summary
    (notice,) = summary.notices
    assert "cannot be stacked, so clients train one by one" in notice.what
    with federation(plain=True) as fed:
        assert federate(Looking(task=mlp_task(), local=SGD(lr=0.1)), fed, 1).summary.notices == []
