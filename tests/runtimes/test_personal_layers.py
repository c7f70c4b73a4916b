"""Layers that stay at their node: never sent, trained with the rest, the same for every method that pools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kilter.core import Method
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.federate import Result, federate
from kilter.inference.model_folder import load_model
from kilter.methods import find
from kilter.records.run_folder import Store, write
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from kilter.train import SGD
from small import mlp_task, near, same, skewed


def mlp(personal: tuple[str, ...] = ()) -> Task:
    whole = mlp_task()
    return Task(lambda: whole.load(whole.init_whole(0)), personal=personal)


def run(name: str, task: Task, rounds: int = 3, **options: object) -> tuple[Method, Result, dict]:
    method = find(name)(task=task, local=SGD(lr=0.3, batch=16, epochs=3))
    with Simulation(skewed(3), **options) as fed:
        result = federate(method, fed, rounds)
        return method, result, {k: dict(v) for k, v in fed.states.items()}


def test_matching_layers_are_not_in_the_shared_model() -> None:
    task = mlp(("head.*",))
    assert task.personal == {"head.weight", "head.bias"}
    assert not any(name.startswith("head.") for name in task.init(0))
    assert set(task.init_whole(0)) == set(task.names.values())


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "feddc"])
def test_every_pooling_method_shares_the_rest(name: str) -> None:
    method, result, states = run(name, mlp(("head.*",)))
    shared = method.model(result.state)
    assert shared is not None
    assert not any(k.startswith("head.") for k in shared)
    heads = [state["~personal"]["head.weight"] for state in states.values() if "~personal" in state]
    assert len(heads) == 3
    assert not torch.equal(heads[0], heads[1])
    assert result.summary.client_model == "personal"
    assert result.summary.client_accuracy is not None
    assert result.summary.client_accuracy.mean > 0.5


def test_fedavg_with_its_normalisation_at_home_is_fedbn() -> None:
    """FedBN keeps BatchNorm layers at the node; so does FedAvg with these layers personal."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
            self.head = nn.Linear(12, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    _, result, _ = run("fedbn", Task(Net()))
    _, kept, _ = run("fedavg", Task(Net(), personal=("body.2.*",)))
    assert near(result.state, kept.state, 1e-6)
    assert [r.own_test for r in result.clients.values()] == [r.own_test for r in kept.clients.values()]


def test_over_a_full_graph_peers_do_what_the_star_does() -> None:
    _, star, _ = run("fedavg", mlp(("head.*",)))
    _, _, states = run("fedavg", mlp(("head.*",)), topology="full")
    assert near(star.state, next(iter(states.values()))["~pool"], 1e-5)


def test_workers_and_resume_change_nothing() -> None:
    _, one, _ = run("fedavg", mlp(("head.*",)))
    _, two, _ = run("fedavg", mlp(("head.*",)), workers=2)
    assert same(one.state, two.state)


def test_less_travels_and_every_client_has_its_whole_model(tmp_path: Path) -> None:
    sizes = {}
    for personal in ("", "head.*"):
        fields = {"model": "mlp:8", "clients": 3, "rounds": 2, "rows": 300, "partition": "iid", "personal": personal}
        experiment = Experiment.of(fields)
        method, fed = experiment.build()
        folder = tmp_path / (personal[:4] or "whole")
        store = Store(folder)
        write(folder / "experiment.toml", experiment.write())
        with fed:
            sizes[personal] = experiment.run(method, fed, store).summary.bytes_up
    assert sizes["head.*"] < 0.95 * sizes[""]
    model = load_model(tmp_path / "head", client="c00")
    assert set(model.params) == set(model.task.names.values())
    with pytest.raises(Mistake, match="--client"):
        load_model(tmp_path / "head")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"personal": "tail.*"}, "No layer"),
        ({"personal": "*"}, "solo"),
        ({"personal": "head.*", "method": "fedpdc", "public": 2}, "pool models"),
    ],
)
def test_impossible_patterns_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(Mistake, match=says):
        Experiment.of({"model": "mlp:8", "clients": 3, **fields}).build()
