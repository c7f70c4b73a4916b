"""Trackers, read back with their own clients. A tracker that fails never stops a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from finished_runs import run

from kilter import cli
from kilter.errors import Mistake
from kilter.records.run_folder import read_rounds, read_summary
from kilter.report.trackers import Trackers, log_finished, round_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "fedavg", "fedavg")


def test_tensorboard_is_read_back(folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert log_finished("tensorboard", folder, "one") == []
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    logged = {e.step: e.value for e in events.Scalars("global/accuracy")}
    for record in read_rounds(folder)[1:]:
        assert record.global_accuracy == pytest.approx(logged[record.round], abs=1e-6)
    assert events.Scalars("traffic/up")[-1].value == read_rounds(folder)[-1].bytes_up
    assert any(tag.startswith("client/") for tag in events.Tags()["scalars"])


def test_mlflow_is_read_back(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert log_finished("mlflow", folder, "one") == []
    from mlflow import MlflowClient

    client = MlflowClient(tmp_path.as_uri())
    (logged,) = client.search_runs([client.get_experiment_by_name("kilter").experiment_id])
    assert logged.data.params["method"] == "fedavg"
    assert logged.data.params["local.epochs"] == "1"
    assert logged.data.metrics["final/global/accuracy"] == pytest.approx(read_summary(folder).global_accuracy)
    history = client.get_metric_history(logged.info.run_id, "train/loss")
    assert [m.step for m in history] == [1, 2]
    names = {a.path for a in client.list_artifacts(logged.info.run_id)}
    assert {"summary.json", "model.safetensors"} <= names
    assert logged.info.status == "FINISHED"


def test_wandb_writes_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert log_finished("wandb", folder, "one") == []
    (record,) = folder.glob("wandb/offline-run-*/*.wandb")
    until = time.monotonic() + 30
    while b"global/accuracy" not in record.read_bytes() and time.monotonic() < until:
        time.sleep(0.2)  # its service writes the file
    assert b"global/accuracy" in record.read_bytes()


class Broken:
    """Fails when told to."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise OSError("the disk is full\nmore")

    def start(self, name: str, settings: Mapping[str, object]) -> None:
        self._call("start")

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        self._call("round")

    def finish(self, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        self._call("finish")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("where", ["start", "round", "finish", "close"])
def test_a_failing_tracker_is_left_out_and_named(folder: Path, where: str) -> None:
    broken, sound, said = Broken(where), Broken(""), list[str]()
    trackers = Trackers({"broken": broken, "sound": sound}, said.append)
    with trackers:
        trackers.start("x", {})
        for record in read_rounds(folder):
            trackers.round(record)
        trackers.finish(folder)
    assert sound.calls == ["start", "round", "round", "round", "finish", "close"]
    assert broken.calls[-1] == where
    assert trackers.problems == said
    assert said[0].startswith("The tracker broken failed and is left out")
    assert said[0].endswith("OSError: the disk is full")


def test_an_unknown_tracker(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="Unknown tracker 'neptune'"):
        Trackers.of("tensorboard, neptune", tmp_path)


@pytest.mark.parametrize("log", ["neptune", "tensorboard"])
def test_a_tracker_that_cannot_be_used_is_refused_before_a_folder_is_made(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kilter.report.trackers.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["kilter", "run", "--log", log, "--rounds", "1", "--out", str(tmp_path / "a")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "racker" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_only_finite_numbers_are_logged(folder: Path) -> None:
    metrics = round_metrics(read_rounds(folder)[-1])
    assert {"train/loss", "global/accuracy", "clients/accuracy/mean", "traffic/up", "failures"} <= set(metrics)
    assert json.dumps(metrics, allow_nan=False)
