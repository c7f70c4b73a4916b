"""A training loop of a user in place of an optimiser."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.fast.fits import run
from kilter.net.policy import PolicyViolation, SitePolicy
from kilter.records.run_folder import Store
from kilter.tasks.training_loop import TrainingLoop
from kilter.train import SGD, run_one
from small import mlp_task, same
from test_optimisers import ROWS, request

LOOPS = """
import torch

def train(job):
    optimiser = torch.optim.SGD(job.parameters(), lr=job.plan.lr, momentum=0.9)
    for batch in job.batches():
        optimiser.zero_grad()
        job.loss(batch).backward()
        optimiser.step()

def broken(job):
    return job.nothing

class Neither:
    pass
"""

LIGHTNING = """
import torch
from lightning.pytorch import LightningModule
from torch import nn

class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)
"""


@pytest.fixture
def loops(tmp_path: Path) -> Path:
    (tmp_path / "loops.py").write_text(LOOPS)
    return tmp_path / "loops.py"


def test_a_loop_that_does_what_sgd_does_gives_its_numbers(loops):
    task = mlp_task()
    own = TrainingLoop(name=f"{loops}:train", lr=0.1, epochs=3, batch=32)
    built_in = run_one(request(task, SGD(lr=0.1, momentum=0.9, epochs=3, batch=32)))
    fitted = run_one(request(task, own))
    assert same(fitted.params, built_in.params)
    assert fitted.steps == built_in.steps == 15
    assert fitted.loss == pytest.approx(built_in.loss)
    assert same(run([request(task, own), request(task, own, ROWS, 8)])[0].params, built_in.params)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_a_loop_works_with_methods_and_repeats_its_numbers(tmp_path, loops, method):
    if method == "scaffold":
        spec = {"method": method, "optimiser": f"{loops}:train", "data": "digits", "rounds": 1}
        with pytest.raises(Mistake, match="rules out: use SGD"):
            run_experiment(tmp_path / "no", spec)
        assert not (tmp_path / "no").exists()  # refused before anything starts
        return
    spec = {"method": method, "optimiser": f"{loops}:train", "data": "digits", "clients": 3, "model": "mlp:8"}
    whole, again = (run_experiment(tmp_path / name, {**spec, "rounds": 2, "local": {"lr": 0.1}}) for name in "ab")
    built_in = {**spec, "rounds": 2, "optimiser": "sgd", "local": {"lr": 0.1, "momentum": 0.9}}
    assert whole == again
    assert whole == pytest.approx(run_experiment(tmp_path / "built-in", built_in), abs=0.01)


def run_experiment(folder: Path, spec: dict[str, object]) -> float:
    experiment = Experiment.of(spec)
    method, fed = experiment.build()
    with fed:
        return experiment.run(method, fed, Store(folder)).summary.global_accuracy


def test_mistakes_are_one_sentence(loops):
    with pytest.raises(Mistake, match="neither a function train"):
        TrainingLoop(name=f"{loops}:Neither")
    with pytest.raises(Mistake, match="broken fails: line 12: AttributeError"):
        run_one(request(mlp_task(), TrainingLoop(name=f"{loops}:broken")))


def test_a_site_runs_only_loops_that_it_trusts(loops):
    policy = SitePolicy(approval="policy")
    with pytest.raises(PolicyViolation, match=r"The server wants 'loops.py:train', a file"):
        policy._own(f"{loops}:train")


def test_a_lightning_module_trains_as_a_step(tmp_path):
    pytest.importorskip("lightning")
    (tmp_path / "lit.py").write_text(LIGHTNING)
    spec = f"{tmp_path / 'lit.py'}:Lit"
    settings = {"model": spec, "optimiser": spec, "data": "digits", "clients": 2, "rounds": 3}
    assert run_experiment(tmp_path / "run", settings) > 0.6
    with pytest.raises(Mistake, match="trains with its own loss, and this method adds to it"):
        run_experiment(tmp_path / "prox", {**settings, "method": "fedprox"})
