"""The list of runs follows the files, whatever state they are in."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from finished_runs import run
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.errors import Mistake
from kilter.report.run_list import QUIET_SECONDS, RunList


def unfinished(folder: Path, rounds: int = 2, planned: int = 10) -> Path:
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(f'method = "fedavg"\ndata = "digits"\nrounds = {planned}\nseed = 3\n')
    for number in range(rounds + 1):
        add(folder, number)
    return folder


def add(folder: Path, number: int, end: str = "\n") -> None:
    record = {
        "round": number,
        "seconds": 2.0,
        "loss": 1 / (number + 1),
        "bytes_up": 10,
        "bytes_down": 5,
        "failures": [{}] * (number == 1),
        "global_metrics": {"accuracy": number / 10},
    }
    with open(folder / "rounds.jsonl", "a") as f:
        f.write(json.dumps(record) + end)


def test_a_finished_run(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg")
    (entry,) = RunList(tmp_path).look()
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (entry.folder, entry.state, entry.round, entry.rounds) == ("a", "finished", 2, 2)
    assert (entry.metric, entry.score) == ("accuracy", summary["global_accuracy"])
    assert entry.bytes == summary["bytes_up"] + summary["bytes_down"]


def test_the_score_of_another_task_keeps_its_name(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "a", rounds=0)
    line = {"round": 1, "seconds": 1.0, "global_metrics": {"mae": 3.5, "loss": 2.0}, "client": {"mae": {"mean": 4.5}}}
    (folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    (entry,) = RunList(tmp_path).look()
    assert (entry.metric, entry.score, entry.client_score) == ("mae", 3.5, 4.5)


def test_a_running_run_is_followed(tmp_path: Path) -> None:
    folder, runs = unfinished(tmp_path / "a"), RunList(tmp_path)
    (entry,) = runs.look()
    assert (entry.state, entry.round, entry.rounds, entry.failures, entry.bytes) == ("running", 2, 10, 1, 45)
    assert entry.seconds_left == pytest.approx(16)
    add(folder, 3, end="")  # a line that is not written completely
    assert runs.look()[0].round == 2
    with open(folder / "rounds.jsonl", "a") as f:
        f.write("\n{damaged\n")
    add(folder, 4)
    (entry,) = runs.look()
    assert entry.round == 4
    assert entry.score == 0.4


def test_a_resumed_run_may_have_fewer_rounds(tmp_path: Path) -> None:
    folder, runs = unfinished(tmp_path / "a", rounds=5), RunList(tmp_path)
    assert runs.look()[0].round == 5
    (folder / "rounds.jsonl").unlink()
    add(folder, 0)
    assert runs.look()[0].round == 0


def test_a_quiet_run_has_stopped(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "a")
    past = time.time() - QUIET_SECONDS - 5
    for name in ("experiment.toml", "rounds.jsonl"):
        os.utime(folder / name, (past, past))
    assert RunList(tmp_path).look()[0].state == "stopped"


def test_a_deleted_run_is_gone_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    unfinished(tmp_path / "a")
    unfinished(tmp_path / "b")
    runs = RunList(tmp_path)
    assert {e.folder for e in runs.look()} == {"a", "b"}
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b" / "summary.json").write_text("{")
    assert [(e.folder, e.state) for e in runs.look()] == [("b", "unreadable")]


def test_what_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    for k in range(500):
        unfinished(tmp_path / f"r{k}", rounds=1)
    runs = RunList(tmp_path)
    assert len(runs.look()) == 500
    before = {id(p) for p in runs._progress.values()}
    runs.look()
    assert {id(p) for p in runs._progress.values()} == before  # nothing is read again


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_in_a_record_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("runs")
    unfinished(folder / "a", rounds=0)
    with open(folder / "a" / "rounds.jsonl", "ab") as f:
        f.write(data)
    (entry,) = RunList(folder).look()
    assert entry.state == "running"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="is not a folder"):
        RunList(tmp_path / "absent")
