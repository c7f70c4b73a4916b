"""FedROD: the balanced softmax, absent classes, and a personal head that never disturbs the body."""

from __future__ import annotations

from math import e, log, sqrt

import pytest
import torch
from acting import play
from torch import Tensor, nn

from kilter.core import Node
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedrod import ABSENT, FedROD
from kilter.params import pick
from kilter.tasks import Task
from kilter.train import SGD
from small import federation, normed_task, same, skewed


class Through(nn.Module):
    """Features are the input; logits too, so that a test can say what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def rod(task: Task | None = None) -> FedROD:
    return FedROD(task=task or normed_task(), local=SGD(lr=0.1, batch=16))


def loss_at(counts: list[float]) -> float:
    """With logits (1, .5, -.2), label 2, and a personal head of zeros."""
    run = rod(Task(Through()))
    w = run.task.init(0) | {"own.head.weight": torch.zeros(3, 3)}
    batch = {"x": torch.tensor([[1, 0.5, -0.2]]), "y": torch.tensor([2])}
    return float(run.loss(w, batch, (torch.tensor(counts) + ABSENT).log()))


def test_known_answer() -> None:
    plain = 1.845911  # what the personal head of zeros adds
    assert loss_at([100, 10, 1]) - plain == pytest.approx(5.866891, abs=1e-5)


def test_equal_class_counts_give_the_plain_loss() -> None:
    assert loss_at([7, 7, 7]) == pytest.approx(2 * 1.845911, abs=1e-5)


def test_an_absent_class_gives_no_infinity() -> None:
    assert loss_at([5, 0, 5]) < 10
    expected = log(5 * (e + sqrt(e))) + 0.2 - log(ABSENT) + 1.845911
    assert loss_at([5, 5, 0]) == pytest.approx(expected, abs=1e-4)  # even where its label occurs


def test_the_personal_loss_does_not_touch_body_or_generic_head() -> None:
    run, node = rod(), Node("c0", skewed()["c0"], round=1)
    start = run.task.init(0)
    prior = torch.zeros(10)
    gradients = []
    for size in (0.0, 3.0):
        torch.manual_seed(5)  # the same dropout
        w = {k: v.clone() for k, v in start.items()}
        w |= {f"own.{k}": size * torch.ones_like(start[k]) for k in run.task.part("head")}
        leaves = [v.requires_grad_() for k, v in w.items() if v.is_floating_point() and k[:3] in ("bod", "hea")]
        gradients.append(torch.autograd.grad(run.loss(w, node.data.train.batch(), prior), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_personal_heads_stay_and_the_generic_model_is_global() -> None:
    run = rod()
    with federation() as fed:
        result = federate(run, fed, 3)
        heads = [fed.states[i]["head"] for i in fed.ids]
    assert set(result.state) == set(run.task.init(0))
    assert result.summary.global_model == "global"
    assert all(not same(a, b) for k, a in enumerate(heads) for b in heads[:k])


def test_before_training_the_personal_prediction_is_the_generic_one() -> None:
    run, node = rod(), Node("new", skewed()["c0"])
    w, x = run.task.init(0), skewed()["c1"].train["x"]
    assert torch.allclose(run.personal(node, w, x), run.task.predict(w, x))


def test_personal_is_generic_plus_own() -> None:
    run, node = rod(), Node("c0", skewed()["c0"], round=1)
    (w, _), _, (after,) = play(run.train(node, run.task.init(0)))
    x = node.data.train["x"]
    own = {k: node.state["head"][f"own.{k}"] for k in run.task.part("head")}
    with torch.no_grad():
        f = run.task.features(w, x)
        expected = run.task.head(w, f) + run.task.head(own, f)
    assert torch.allclose(run.personal(node, w, x), expected, atol=1e-6)
    assert same(pick(after, w), w)


def test_a_network_without_body_and_head_is_refused() -> None:
    with federation() as fed, pytest.raises(Mistake, match="submodule 'head'"):
        federate(rod(Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))), fed, 1)
