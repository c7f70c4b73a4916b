"""The command line, typed as a user would: exit codes, files, sentences instead of tracebacks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SMALL = ["--rows", "300", "--clients", "3", "--model", "linear", "--partition", "iid", "--workers", "1"]


def test_a_run_leaves_everything_to_read_and_repeat_it(kilter, tmp_path):
    code, shown, _ = kilter("run", "--method", "fedprox", "--set", "mu=0.1", *SMALL, "--rounds", "2", "--out", "runs/x")
    assert code == 0
    assert "round 2/2" in shown
    assert "runs/x" in shown
    folder = tmp_path / "runs/x"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["method"] == "fedprox"
    assert {"rounds", "seed", "global_accuracy", "client_accuracy", "bytes_up", "bytes_down", "seconds"} <= set(summary)
    assert {"mean", "std", "min", "max", "worst_decile"} == set(summary["client_accuracy"])
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in lines] == [0, 1, 2]
    assert len(json.loads((folder / "clients.json").read_text())["last"]["clients"]) == 3
    code, *_ = kilter("run", str(folder / "experiment.toml"), "--out", "again", "--workers", "1")
    assert code == 0
    again = json.loads((tmp_path / "again/summary.json").read_text())
    assert again["last"] == summary["last"]


def test_what_is_typed_beside_a_file_wins(kilter, tmp_path):
    (tmp_path / "e.toml").write_text(
        'method = "fedprox"\nrounds = 1\nrows = 300\nclients = 3\nmodel = "linear"\n[settings]\nmu = 0.5\n'
    )
    code, *_ = kilter("run", "e.toml", "--seed", "7", "--set", "mu=0.25", "--out", "x", "--workers", "1", "--lr", "0.5")
    assert code == 0
    written = (tmp_path / "x/experiment.toml").read_text()
    assert "seed = 7" in written
    assert "mu = 0.25" in written
    assert "lr = 0.5" in written


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--method", "fedporx"], "did you mean 'fedprox'"),
        (["run", "--set", "mu"], "NAME=VALUE"),
        (["run", "--clients", "5000", "--workers", "1"], "clients"),
        (["run", "--workers", "many"], "--workers"),
        (["run", "--runtime", "rai", *SMALL], "did you mean 'ray'"),
        (["run", "--ray-address", "head:6379", *SMALL], "--runtime ray"),
        (["run", "nowhere.toml"], "cannot be read"),
        (["run", "--beta1", "0.5"], "optimiser"),
        (["run", "--data", "nowhere.npz"], "nowhere.npz"),
        (["run", "--method", "pooled", "--topology", "ring", *SMALL], "aggregator"),
        (["resume", "nowhere"], "not a run folder"),
        (["show", "--partition", "dirchlet"], "did you mean 'dirichlet'"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_two(kilter, tmp_path, words, says):
    code, _, said = kilter(*words)
    assert code == 2
    assert says in said
    assert "Traceback" not in said
    assert said.startswith("kilter: ")
    assert not (tmp_path / "runs").exists()


def test_bad_data_files_are_named(kilter, tmp_path):
    x = np.random.default_rng(0).normal(size=(50, 4))
    x[3, 2] = np.nan
    np.savez(tmp_path / "nan.npz", x=x, y=np.arange(50) % 2)
    code, _, said = kilter("run", "--data", "nan.npz", "--model", "linear", "--workers", "1")
    assert code == 2
    assert "Data 'nan'" in said
    assert "NaN" in said


def test_a_folder_that_holds_something_else_is_left_alone(kilter, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    code, _, said = kilter("run", *SMALL, "--out", "mine")
    assert code == 2
    assert "choose another --out" in said
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    kilter("run", *SMALL, "--rounds", "1", "--out", "x")
    code, _, said = kilter("run", *SMALL, "--rounds", "1", "--out", "x")
    assert code == 2
    assert "finished run" in said


def test_lists_say_what_there_is(kilter):
    for command, name in (
        ("methods", "scaffold"),
        ("datasets", "femnist"),
        ("models", "resnet18"),
        ("partitions", "dirichlet"),
        ("topologies", "small-world"),
        ("version", "0."),
    ):
        code, shown, _ = kilter(command)
        assert code == 0
        assert name in shown


def test_show_draws_the_skew(kilter, tmp_path):
    code, shown, _ = kilter("show", "--partition", "dirichlet:0.1", "--clients", "5", "--picture", "skew.png")
    assert code == 0
    assert "c04" in shown
    assert (tmp_path / "skew.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_ctrl_c_stops_cleanly_says_how_to_resume_and_resume_ends_the_same(kilter, tmp_path, workers):
    words = [*SMALL[:-1], workers, "--rounds", "100"]  # many: it must not be over before it is stopped
    argv = [sys.executable, "-c", "from kilter.cli import main; main()", "run", *words, "--out", "stopped"]
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rounds = Path(tmp_path / "stopped/rounds.jsonl")
    end = time.monotonic() + 60
    while time.monotonic() < end and not (rounds.exists() and rounds.read_text().count("\n") > 3):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "kilter resume stopped" in said
    assert "Traceback" not in said
    assert not (tmp_path / "stopped/summary.json").exists()
    code, *_ = kilter("resume", "stopped", "--workers", "1")
    assert code == 0
    kilter("run", *words, "--out", "straight")
    a, b = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("stopped", "straight"))
    assert a["last"] == b["last"]
    assert a["bytes_up"] == b["bytes_up"]
    assert (tmp_path / "stopped/model.safetensors").read_bytes() == (
        tmp_path / "straight/model.safetensors"
    ).read_bytes()


def test_a_method_and_a_model_from_a_users_own_files(kilter, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from kilter import Method, step\n"
        "from kilter.params import mean\n"
        "from torch import nn\n"
        "def Net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Plain(Method):\n"
        "    boost: float = 1.0  # a setting\n"
        "    def setup(self, fed): return self.task.init(fed.seed)\n"
        "    def round(self, fed, w): return fed.pool(self.train, self.combine, w)\n"
        "    @step\n"
        "    def train(self, node, w): return (yield node.fit(self.loss, w, self.local))\n"
        "    @step\n"
        "    def combine(self, hub, w, replies): return mean(replies.values())\n"
        "    def loss(self, w, batch, _): return self.boost * self.task.loss(w, batch)\n"
    )
    code, shown, said = kilter(
        "run", "--method", "mine.py:Plain", "--model", "mine.py:Net", "--set", "boost=2", "--rows", "300", "--clients", "3",
        "--rounds", "2", "--workers", "2", "--out", "x",
    )  # fmt: skip
    assert code == 0, said
    assert "round 2/2" in shown
