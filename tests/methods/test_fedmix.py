"""FedMix: the loss by hand, its distance from mix-up, the term that must not shrink with the batch, and what is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import is_fedavg, play
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from kilter.core import Batch, Node
from kilter.federate import federate
from kilter.methods.fedmix import FedMix
from kilter.tasks import Task
from kilter.train import SGD
from small import federation, method, normed_task, skewed


class Logistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def entropy(out: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(out, y, reduction="none")


def mix(task: Task | None = None, **settings: Any) -> FedMix:
    return FedMix(task=task or normed_task(), local=SGD(lr=0.1, batch=16), **settings)


def toy(rows: int = 1) -> Batch:
    """The same row, several times."""
    one = {"x": torch.tensor([[1.0, 2.0]]), "xbar": torch.tensor([[0.2, 0.4]])}
    one |= {"y": torch.tensor([1.0]), "ybar": torch.tensor([0.3])}
    return {k: v.repeat(rows, *[1] * (v.dim() - 1)) for k, v in one.items()}


def loss(lam: float, batch: Batch) -> float:
    task = Task(Logistic(), loss=entropy, metrics={})
    return float(mix(task, lam=lam).loss(task.init(0), batch, None).detach())


def mixup(lam: float) -> float:
    """The loss it stands for: rows and labels mixed."""
    task, b = Task(Logistic(), loss=entropy), toy()
    out = task.outputs(task.init(0), (1 - lam) * b["x"] + lam * b["xbar"])
    return float((1 - lam) * entropy(out, b["y"]) + lam * entropy(out, b["ybar"]))


def test_by_hand() -> None:
    assert loss(0.1, toy()) == pytest.approx(0.665243 + 0.067616 + 0.001045, abs=2e-6)
    assert mixup(0.1) == pytest.approx(0.733765, abs=2e-6)


def test_the_error_shrinks_with_the_square_of_lam() -> None:
    double = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        errors = [abs(loss(lam, {k: v.double() for k, v in toy().items()}) - mixup(lam)) for lam in (0.04, 0.02, 0.01)]
    finally:
        torch.set_default_dtype(double)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_the_gradient_term_does_not_shrink_with_the_batch() -> None:
    assert loss(0.1, toy(rows=10)) == pytest.approx(loss(0.1, toy()), abs=1e-6)


def test_the_third_term_is_the_derivative_of_the_first() -> None:
    """Through a network with BatchNorm and dropout, against a difference."""
    run, rows = mix(lam=0.2), skewed()["c0"].train
    batch = {k: v.double() if v.is_floating_point() else v for k, v in rows.batch(torch.arange(12)).items()}
    w = {k: v.double() if v.is_floating_point() else v for k, v in run.task.init(0).items()}
    batch |= {"xbar": torch.rand(12, 1, 8, 8).double(), "ybar": torch.full((12, 10), 0.1).double()}

    def total(xbar: Tensor) -> Tensor:
        torch.manual_seed(3)
        return run.loss(w, batch | {"xbar": xbar}, None).detach()

    def first(step: float) -> Tensor:
        torch.manual_seed(3)
        x = 0.8 * batch["x"] + step * batch["xbar"]
        return run.task.rows_loss(run.task.outputs(w, x, training=True), batch["y"]).mean().detach()

    third = float(total(batch["xbar"]) - total(torch.zeros_like(batch["xbar"])))
    assert third == pytest.approx(0.2 * float(first(1e-5) - first(-1e-5)) / 2e-5, rel=1e-5)


def test_without_mixing_it_is_fedavg() -> None:
    assert is_fedavg("fedmix", 2, lam=0.0, task=normed_task())
    assert not is_fedavg("fedmix", 2, lam=0.1)


def test_means_cover_all_rows_in_groups_of_at_least_mash() -> None:
    run, data = mix(mash=7), skewed()["c0"]
    actual = run.mashed(Node("c0", data))
    n = len(data.train)
    assert len(actual["x"]) == len(actual["y"]) == n // 7
    assert torch.allclose(actual["y"].sum(1), torch.ones(n // 7))
    few = run.mashed(Node("few", skewed()["c1"].__class__(*[data.train.take(torch.arange(3))] * 3)))
    assert torch.allclose(few["x"][0], data.train["x"][:3].mean(0))


def test_means_are_sent_once_and_kept() -> None:
    with federation() as fed:
        result = federate(method("fedmix"), fed, 3)
        down = [r.bytes_down for r in result.rounds]
        assert down[0] == 0
        assert down[1] > 1.5 * down[2] == 1.5 * down[3]
        pools = [fed.states[i]["means"]["x"] for i in fed.ids]
    assert all(torch.equal(p, pools[0]) for p in pools)
    with federation() as fed:
        plain = federate(method("fedavg"), fed, 3)
    assert down[3] == pytest.approx(plain.rounds[3].bytes_down, rel=0.05)
    assert result.rounds[3].bytes_up == plain.rounds[3].bytes_up


def test_an_absent_node_gets_the_means_later() -> None:
    with federation() as fed:
        result = federate(method("fedmix", cohort=0.5), fed, 5)
        took = {i for r in result.rounds[1:] for i in r.participants}
        assert {i for i in fed.ids if "means" in fed.states.get(i, {})} == took


def test_every_row_is_mixed_with_a_mean_of_the_pool() -> None:
    run, node = mix(), Node("c0", skewed()["c0"], round=1)
    means = run.mashed(node)
    _, (fit,), _ = play(run.train(node, (run.task.init(0), means)))
    pool = means["x"].flatten(1)
    assert all(any(torch.equal(row, m) for m in pool) for row in fit.rows["xbar"].flatten(1))
    node.state = {}
    _, (fit,), _ = play(run.train(node, (run.task.init(0), {})))  # nobody's means came: its own
    assert len(fit.rows["ybar"]) == len(node.data.train)
