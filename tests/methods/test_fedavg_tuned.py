"""FedAvg with a fine-tuning server."""

from __future__ import annotations

from typing import Any

from kilter import SGD, Result, federate
from kilter.core import Method
from kilter.methods.fedavg import FedAvg
from kilter.methods.fedavg_tuned import FedAvgTuned
from small import federation, mlp_task, near, same

PLAN = SGD(lr=0.1, batch=16)


def run(method: Method, rounds: int = 2, **options: Any) -> Result:
    with federation(**options) as fed:
        return federate(method, fed, rounds, evaluate_every=rounds)


def test_without_tuning_it_is_fedavg() -> None:
    tuned = FedAvgTuned(task=mlp_task(), local=PLAN, server_epochs=0, pretrain=0)
    assert same(run(tuned).state, run(FedAvg(task=mlp_task(), local=PLAN)).state)


def test_tuning_starts_from_the_mean_of_fedavg() -> None:
    method = FedAvgTuned(task=mlp_task(), local=PLAN, pretrain=0, server_lr=1e-12)
    assert near(run(method).state, run(FedAvg(task=mlp_task(), local=PLAN)).state, 1e-5)
    strong = FedAvgTuned(task=mlp_task(), local=PLAN, server_lr=0.1)
    assert not near(run(strong).state, run(method).state, 1e-2)


def test_with_fedsbmes_client_schedule_it_is_fedsbme_without_a_posterior() -> None:
    """The control: same clients, same server, no posterior; bit for bit."""
    from kilter.methods.fedsbme import FedSBME

    plan = SGD(lr=0.1, batch=16, epochs=3)
    server = {"server_epochs": 2, "server_batch": 32, "pretrain": 1}
    control = FedAvgTuned(task=mlp_task(), local=plan, lr_schedule="fedbe", client_swa_start=0.5, **server)
    method = FedSBME(task=mlp_task(), local=plan, **server)
    models = []
    for m in (control, method):
        with federation() as fed:
            models.append(federate(m, fed, 3, evaluate_every=3).model)
    assert same(*models)
