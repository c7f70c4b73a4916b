"""A network in two parts: body and head, and what methods ask of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kilter.core import alone
from kilter.errors import Mistake
from kilter.fast.stack import run_stack
from kilter.models import build
from kilter.params import vector
from kilter.tasks import EVAL_BATCH, Task
from small import SHAPE, digits, mlp_task, normed_task, same


@pytest.mark.parametrize("name", ["mlp:16", "cnn", "linear", "simple-cnn"])
def test_outputs_are_the_head_of_the_features(name: str) -> None:
    task = Task(lambda: build(name, SHAPE, 10), mean=(0.3,), std=(0.4,))
    w, x = task.init(0), digits()["x"][:20]
    assert torch.equal(task.head(w, task.features(w, x)), task.outputs(w, x))
    assert task.head_shape() == (10, task.features(w, x).shape[1])


def test_features_update_the_statistics_like_outputs() -> None:
    task, x = normed_task(), digits()["x"][:20]
    a, b = task.init(0), task.init(0)
    task.outputs(a, x, training=True)
    task.features(b, x, training=True)
    assert same(a, b)
    assert not same(a, task.init(0))


def test_predictions_do_not_depend_on_batches() -> None:
    task, x = mlp_task(), digits()["x"][: 2 * EVAL_BATCH + 3]
    w = task.init(0)
    actual = task.batched(lambda part: task.features(w, part), x)
    assert torch.allclose(actual, task.features(w, x), atol=1e-6)
    assert not actual.requires_grad


def test_a_network_without_body_and_head_is_refused() -> None:
    task = Task(lambda: nn.Linear(4, 2))
    for ask in (lambda: task.features(task.init(0), torch.zeros(1, 4)), task.head_shape):
        with pytest.raises(Mistake, match="submodule"):
            ask()


def test_a_model_as_one_vector() -> None:
    assert vector({"a": torch.ones(2, 2), "b": torch.tensor(3.0)}).tolist() == [1, 1, 1, 1, 3]


def test_a_loss_marked_alone_is_not_stacked() -> None:
    from kilter.core import Fit
    from kilter.train import SGD

    task = mlp_task()

    @alone
    def loss(w, batch, _):  # type: ignore[no-untyped-def]
        return task.loss(w, batch)

    fits = [Fit(loss, task.init(0), digits().take(torch.arange(5)), SGD(), k) for k in range(2)]
    assert run_stack(fits) is None
