"""FedEM: the E-step's known answers and its order, and M = 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import is_fedavg, models, play
from torch import nn

from kilter.core import Node
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedem import FedEM
from kilter.models import build
from kilter.params import average
from kilter.tasks import Task
from kilter.train import SGD
from small import SHAPE, federation, method, mlp_task, near, normed_task, same, skewed


def em(task: Task | None = None, **settings: Any) -> FedEM:
    return FedEM(task=task or normed_task(), local=SGD(lr=0.1, batch=16), **settings)


def test_the_e_step_by_hand() -> None:
    pi, losses = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([[0.2], [1.0], [0.5]])
    q, _ = em().expect(pi, losses)
    assert q[:, 0].tolist() == pytest.approx([0.638600, 0.172165, 0.189235], abs=1e-6)
    # A second row whose q is (.2, .3, .5):
    second = -(torch.tensor([0.2, 0.3, 0.5]) / pi).log()
    q, new = em().expect(pi, torch.cat([losses, second[:, None]], 1))
    assert q[:, 1].tolist() == pytest.approx([0.2, 0.3, 0.5], abs=1e-6)
    assert new.tolist() == pytest.approx([0.419300, 0.236083, 0.344618], abs=1e-6)


def test_one_component_is_fedavg() -> None:
    task = normed_task()
    with federation(stack=False) as fed:
        (actual,) = federate(method("fedem", task, components=1), fed, 3).state
    assert same(actual, models("fedavg", 3, task=task))
    assert not is_fedavg("fedprox", 2, mu=1.0)  # the comparison can fail


def test_rows_keep_their_own_weights() -> None:
    """The E-step runs in the order of the rows, whatever the order of the batches."""
    run, data = em(), skewed()["c0"]
    w = run.setup(type("Fed", (), {"seed": 0})())
    kept = []
    for round in (1, 2):  # other orders of batches
        node = Node("c0", data, round=round)
        _, fits, _ = play(run.train(node, w))
        x, y = data.train["x"], data.train["y"]
        losses = torch.stack([run.task.rows_loss(run.task.predict(m, x), y) for m in w])
        q = (-losses).softmax(0)  # pi is even at first
        assert torch.allclose(torch.stack([f.rows["weight"] for f in fits]), q)
        assert node.state["pi"].tolist() == pytest.approx(q.mean(1).tolist())
        kept.append(node.state["pi"])
    assert torch.equal(*kept)


def test_the_mixture_continues_from_round_to_round() -> None:
    run, node = em(), Node("c0", skewed()["c0"], round=1, state={"pi": torch.tensor([1.0, 0.0, 0.0])})
    play(run.train(node, run.setup(type("Fed", (), {"seed": 0})())))
    assert node.state["pi"].tolist() == [1, 0, 0]  # what is impossible stays so


def test_each_component_is_averaged_separately() -> None:
    run = em(mlp_task(), components=2)
    with federation(stack=False) as fed:
        state = federate(run, fed, 1).state
        replies = []
        for i in fed.ids:
            replies.append(play(run.train(Node(i, fed.clients[i], round=1, step="train"), run.setup(fed)))[0])
    for m in (0, 1):
        assert near(state[m], average((new[m], n) for new, n in replies), 1e-6)


def test_predictions_are_logarithms_of_a_mixture() -> None:
    run, node = em(), Node("c0", skewed()["c0"], state={"pi": torch.tensor([0.7, 0.1, 0.2])})
    w, x = run.setup(type("Fed", (), {"seed": 0})()), skewed()["c1"].train["x"]
    actual = run.personal(node, w, x).exp()
    each = torch.stack([run.task.predict(m, x).softmax(1) for m in w])
    assert torch.allclose(actual, torch.einsum("m,mnc->nc", node.state["pi"], each), atol=1e-6)
    assert torch.allclose(actual.sum(1), torch.ones(len(x)))


def test_there_is_no_global_model() -> None:
    with federation() as fed:
        result = federate(em(), fed, 1)
    assert result.model is None
    assert result.summary.global_model == "mean of personal models"


def test_components_with_equal_initial_weights_are_refused() -> None:
    module = build("mlp:8", SHAPE, 10)
    assert isinstance(module, nn.Module)
    with federation() as fed, pytest.raises(Mistake, match="start from different weights"):
        federate(em(Task(module)), fed, 1)
