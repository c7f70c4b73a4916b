"""Mistakes in a user's own model, method or file: one sentence before the run starts, exit code 2, no folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kilter import cli

COMMON = ["--rows", "300", "--clients", "3", "--partition", "iid", "--workers", "1", "--rounds", "1"]

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear({width}, {outputs})
    def forward(self, x):
        return {result}
"""
METHOD = """
from dataclasses import dataclass
from kilter import Method, step
from kilter.params import average
@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    def setup(self, fed):
        return self.task.init(fed.seed)
    def round(self, fed, w):
        return fed.pool(self.train, self.combine, w)
    @step
    def train(self, node, w):
        w = yield node.fit(self.loss, w, self.local)
        return w, len(node.data.train)
    @step
    def combine(self, hub, w, replies):
        return average(replies.values())
    def loss(self, w, batch, _):
        return self.task.loss(w, batch)
"""
NORMED = """
from torch import nn
def Net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Run a command that must be refused; returns the one sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["kilter", "run", *words, *COMMON])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert ended.value.code == 2, err
        assert out == ""
        assert err.startswith("kilter: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        assert not Path("runs").exists()
        return err

    return run


def net(width: str = "64", outputs: str = "classes", result: str = "self.head(self.flat(x))") -> str:
    return NET.format(width=width, outputs=outputs, result=result)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            net(width="100"),
            "net.py:Net fails on a batch of shape (13, 1, 8, 8) (rows, then one sample's shape): line 8: Runtime",
        ),
        (net(outputs="1"), "returns outputs of shape (13, 1) for 13 rows of 10 classes: it must return (13, 10)"),
        (net(result="self.head(self.flat(x)).sum(1)"), "returns outputs of shape (13,) for 13 rows"),
        (net(result="(self.head(self.flat(x)), x)"), "returns a tuple: its forward must return one tensor"),
        (net(result="self.haed(x)"), "line 8: AttributeError: 'Net' object has no attribute 'haed'"),
        ("Net = 3", "is not a class or function"),
        ("def Net(shape, classes): return None", "it must return a torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_work(refused, source, message):
    Path("net.py").write_text(source)
    assert message in refused("--model", "net.py:Net")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("w = yield node.fit", "w = node.fit", "`train` returns a Fit that was not performed: write `yield node.fit(...)`"),
        ("yield node.fit(self.loss, w, self.local)", "yield w", "`train` yields a dict: it may only yield `node.fit(...)`"),
        ("def round", "def rounds", "has no `round`: define round"),
        ("return fed.pool", "fed.pool", "`round` of the method mine.py:Mine returns nothing: return the next state"),
        ("return self.task.loss(w, batch)", "return self.task.losses(w, batch)", "returns a tensor of shape (32,): it must"),
        ("return self.task.loss(w, batch)", "return 0.0", "returns a float: it must return one number"),
        ("average(replies", "averag(replies", "fails on one batch: line 17: NameError: name 'averag' is not defined"),
        ("self.local)", "self.lokal)", "line 13: AttributeError: 'Mine' object has no attribute 'lokal'"),
        ("    @step\n    def train", "    def train", "has no step 'train'"),
        ("class Mine(Method)", "class Mine", "derived from kilter.Method"),
    ],
)  # fmt: skip
def test_a_method_that_cannot_work(refused, old, new, message):
    assert old in METHOD
    Path("mine.py").write_text(METHOD.replace(old, new))
    assert message in refused("--method", "mine.py:Mine", "--model", "linear")


def test_the_method_itself_works(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD)
    monkeypatch.setattr(sys, "argv", ["kilter", "run", "--method", "mine.py:Mine", "--model", "linear", *COMMON])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert Path("runs/mine-digits-0/summary.json").exists()


def test_batchnorm_with_batches_of_one(refused):
    Path("net.py").write_text(NORMED)
    message = "BatchNorm cannot train on a batch of one row, such as one of client 'c00': use a larger --batch"
    assert message in refused("--model", "net.py:Net", "--batch", "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local = 3", "local of the experiment is a table of fields, not 3: write a section [local]"),
        ('settings = "mu"', "settings of the experiment is a table of fields, not 'mu': write a section [settings]"),
        ('method = "fedsbme"\n[settings]\nserver_batch = -3', "server_batch of FedSBME must be at least 0, not -3"),
        ('method = "fedprox"\n[settings]\nmu = nan', "mu of FedProx must be a finite number at least 0, not nan"),
        ("[local]\nlr = inf", "lr of SGD must be a finite number above 0, not inf"),
        ("seed = [1]", "seed of the experiment takes a whole number (such as 0), not [1]"),
    ],
)
def test_an_experiment_file_that_cannot_work(refused, text, message):
    Path("e.toml").write_text(text)
    assert message in refused("e.toml", "--model", "linear")
