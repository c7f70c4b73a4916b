"""Ensembles of models: members, prediction, files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from kilter.blocks import ensemble
from kilter.blocks.posterior import (
    deviation_of,
    dirichlet,
    refresh_batchnorm,
)
from kilter.errors import Mistake
from kilter.params import average
from kilter.records import ensemble_file, wire
from kilter.tasks import Task
from small import bench, method, near, same

SIZES = [100, 300, 600]


def made(task: Task, kind: str) -> ensemble.Ensemble:
    clients = [task.init(s) for s in range(3)]
    mean = average(zip(clients, SIZES, strict=True))
    e = ensemble.ensemble(refresh_batchnorm(task, mean, bench()), clients)
    if kind == "gaussian":
        e["deviation"], e["seeds"] = deviation_of(mean, clients, SIZES, None, 0), [3, 4]
    else:
        e["shares"] = dirichlet(SIZES, 1, False, 2, np.random.default_rng(0))
    return ensemble.with_statistics(task, e, bench())


@pytest.mark.parametrize("kind", ["gaussian", "dirichlet"])
def test_samples_are_the_same_every_time_and_have_their_own_statistics(kind: str) -> None:
    task = Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10)))
    e = made(task, kind)
    first, second = (list(ensemble.members(e)) for _ in range(2))
    assert same(first, second)
    assert len(first) == ensemble.size(e) == 1 + 3 + 2
    for w in ensemble.samples(e):
        assert near(w, refresh_batchnorm(task, w, bench()))
        assert float(w["~2.running_var"].min()) > 0
        assert not near(w, e["mean"], 1e-3)


def test_an_ensemble_is_saved_and_predicts_with_its_uncertainty(tmp_path) -> None:
    task = method("fedavg").task
    e = made(task, "gaussian")
    ensemble_file.save(tmp_path / "e.safetensors", e)
    again = ensemble_file.load(tmp_path / "e.safetensors")
    p, unsure = ensemble.predict(task, again, bench()["x"])
    assert torch.equal(p, ensemble.probabilities(task, e, bench()))
    assert p.sum(1).numpy() == pytest.approx(1, abs=1e-6)
    assert bool(((unsure > 0) & (unsure <= 1)).all())


@pytest.mark.parametrize("content", [b"", b"nonsense", wire.encode({"w": torch.zeros(1)}), wire.encode([1])])
def test_a_file_that_is_not_an_ensemble_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "e.safetensors"
    path.write_bytes(content)
    for wrong in (path, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Mistake, match="holds no ensemble"):
            ensemble_file.load(wrong)
