"""The controls of FEDSBME: the server's rows alone, and FedAvg with the same fine-tuning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kilter import SGD, Mistake, Result, federate
from kilter.core import Method
from kilter.methods import find
from kilter.methods.fedavg_tuned import FedAvgTuned
from kilter.methods.server_only import ServerOnly
from kilter.runtimes.step_names import StepName
from small import federation, mlp_task, normed_task, public, same, skewed

PLAN = SGD(lr=0.1, batch=16)


def run(method: Method, rounds: int = 2, **options: Any) -> Result:
    with federation(**options) as fed:
        return federate(method, fed, rounds, evaluate_every=rounds)


def test_names_on_the_command_line_have_dashes() -> None:
    assert find("server-only") is ServerOnly
    assert find("fedavg-tuned") is FedAvgTuned


def test_the_model_does_not_depend_on_clients_and_costs_no_traffic() -> None:
    first, second = (run(ServerOnly(task=mlp_task(), local=PLAN), clients=skewed(4, seed=s)) for s in (0, 1))
    assert same(first.state, second.state)
    assert first.summary.bytes_up == first.summary.bytes_down == 0


def test_the_server_learns_from_its_rows() -> None:
    method = ServerOnly(task=normed_task(), local=PLAN, server_lr=0.2, server_batch=16)
    actual = run(method, 4)
    assert method.task.evaluate(actual.state, public())["accuracy"] > 0.5
    assert sum(r.steps for r in actual.rounds) == (5 + 4 * 5) * -(-len(public()) // 16)


def test_the_learning_rate_of_the_server_does_not_decay() -> None:
    plans = (PLAN, SGD(lr=0.1, batch=16, decay=0.1))
    assert same(*(run(ServerOnly(task=mlp_task(), local=p)).state for p in plans))


@pytest.mark.parametrize("kind", [ServerOnly, FedAvgTuned])
def test_topologies(kind: Any) -> None:
    method = kind(task=mlp_task(), local=PLAN, server_lr=0.5, server_batch=16)
    assert run(method, topology="rotating").summary.global_accuracy > 0.15
    with pytest.raises(Mistake, match="use --topology star or rotating"):
        run(method, topology="ring")
    with pytest.raises(Mistake, match="public"):
        run(method, public=None)


def test_public_rows_come_from_a_file(tmp_path) -> None:
    import numpy as np

    from kilter.experiment import Experiment

    base = {"data": "digits", "rows": 300, "clients": 3, "rounds": 1, "model": "linear", "method": "server-only"}
    rng = np.random.default_rng(0)
    path = tmp_path / "public.npz"
    np.savez(path, x=rng.random((20, 1, 8, 8), dtype=np.float32), y=np.arange(20) % 10)
    made = Experiment.of({**base, "public_file": str(path)})
    method, fed = made.build()
    assert len(fed.node("server", StepName("tune"), 1, {}).public) == 20
    assert torch.equal(fed.public["y"], torch.arange(20) % 10)
    assert federate(method, fed, 1).summary.bytes_down == 0
    with pytest.raises(Mistake, match="not both"):
        Experiment.of({**base, "public_file": str(path), "public": 2})
    with pytest.raises(Mistake, match="leave out public_file"):
        Experiment.of({**base, "public_file": str(path), "partition": "fedsbme"}).build()
    for x, y, says in (
        (np.zeros((20, 1, 9, 9), np.float32), np.arange(20) % 10, "shape"),
        (rng.random((20, 1, 8, 8), dtype=np.float32), np.arange(20), "out of range"),
        (made.dataset().x[made.dataset().train[:20]].numpy(), np.arange(20) % 10, "20 rows .* are also in 'digits'"),
    ):
        np.savez(path, x=x, y=y)
        with pytest.raises(Mistake, match=says):
            made.build()
