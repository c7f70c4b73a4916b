"""FedProx: known answers and laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from acting import FULL, run

from kilter.core import Node
from kilter.params import sub, weights
from kilter.runtimes.step_runner import run_step
from kilter.train import SGD
from small import (
    constant,
    digits,
    linear_task,
    method,
    mlp_task,
    near,
    normed_task,
    same,
    skewed,
)


def test_known_answer() -> None:
    """w = (1, -1), w^t = (.5, .5), g = (.2, .4), eta .1, mu 1 -> (.93, -.89)."""
    task = linear_task([0.5, 0.5])
    prox = method("fedprox", task, mu=1.0, local=SGD(lr=0.1, batch=0))
    node = Node("a", constant([[0.2, 0.4]]))
    fit = node.fit(prox.loss, {"w": torch.tensor([1.0, -1.0])}, prox.local, ctx={"w": torch.tensor([0.5, 0.5])})  # type: ignore[attr-defined]
    (done,) = run_step(lambda *_: (yield fit), [node], [None])
    assert near(done.reply, {"w": torch.tensor([0.93, -0.89])})


def test_two_local_steps_by_hand() -> None:
    # From 0: step one has no pull (-.2), step two is pulled back by mu (w - w^t) = -.2.
    actual = run("fedprox", {"a": constant([[2.0]])}, task=linear_task([0.0]), mu=1.0, local=SGD(lr=0.1, epochs=2))
    assert actual.state["w"].item() == pytest.approx(-0.2 - 0.1 * (2 - 0.2))


def test_mu_zero_is_fedavg_bit_for_bit() -> None:
    clients = skewed()
    for task in (mlp_task(), normed_task()):
        plain, prox = (run(n, clients, 3, task, **s) for n, s in (("fedavg", {}), ("fedprox", {"mu": 0.0})))
        assert same(plain.state, prox.state)
        assert [r.loss for r in plain.rounds] == [r.loss for r in prox.rounds]


def test_the_first_local_step_is_that_of_fedavg() -> None:
    clients = skewed()
    plain, prox = run("fedavg", clients, local=FULL), run("fedprox", clients, local=FULL, mu=10.0)
    assert near(plain.state, prox.state)
    further = replace(FULL, epochs=5)
    assert not near(
        run("fedavg", clients, local=further).state, run("fedprox", clients, local=further, mu=1.0).state, 1e-4
    )


def test_a_larger_mu_stays_nearer() -> None:
    clients = skewed()
    start = mlp_task().init(0)
    gone = [
        sum(
            float((v**2).sum())
            for v in sub(run("fedprox", clients, mu=mu, local=SGD(lr=0.05, batch=16)).state, start).values()
        )
        for mu in (0.0, 1.0, 10.0)
    ]
    assert gone[0] > gone[1] > gone[2]


def test_the_proximal_term_ignores_buffers() -> None:
    task = normed_task()
    w = task.init(0)
    far = {k: v + 1 for k, v in w.items() if v.is_floating_point()}
    prox = method("fedprox", task, mu=2.0)
    batch = digits().batch(torch.arange(20))
    torch.manual_seed(0)
    pulled = prox.loss(dict(w), batch, weights(far))  # type: ignore[attr-defined]
    torch.manual_seed(0)
    assert (pulled - task.loss(dict(w), batch)).item() == pytest.approx(task.size(), rel=1e-4)  # mu/2 sum 1^2
