"""A Task: any nn.Module as pure functions of a flat dict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kilter.core import Rows
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.params import buffers, weights
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from kilter.tasks import task as task_module
from kilter.train import SGD
from small import (
    Normed,
    Vector,
    digits,
    method,
    mlp_task,
    near,
    normed_task,
    same,
    skewed,
)

ROWS = digits().take(torch.arange(600))


def test_a_function_gives_new_weights_for_each_seed_and_a_module_its_own() -> None:
    task = mlp_task()
    assert same(task.init(3), task.init(3))
    assert not near(task.init(3), task.init(4), 1e-3)
    net = nn.Linear(2, 3)
    fixed = Task(net)
    assert same(fixed.init(0), fixed.init(5))
    assert torch.equal(fixed.init(0)["weight"], net.weight)
    with torch.no_grad():
        net.weight.zero_()
    assert fixed.init(0)["weight"].abs().sum() > 0  # the user's module and ours are two


def test_initialisation_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Task(Normed).init(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_initial_model_is_a_copy() -> None:
    task = mlp_task()
    task.init(0)["head.bias"] += 100
    assert task.init(0)["head.bias"].max() < 10


def test_buffers_are_marked_and_weights_counted() -> None:
    task = normed_task()
    model = task.init(0)
    assert set(buffers(model)) == {f"~body.2.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert task.size() == sum(p.numel() for p in Normed().parameters())
    assert len(weights(model)) == len(list(Normed().parameters()))


def test_outputs_are_those_of_the_module() -> None:
    task = normed_task()
    model = task.init(0)
    net = task.load(model)
    assert not net.training
    assert torch.equal(task.outputs(model, ROWS["x"][:20]), net(ROWS["x"][:20]))
    assert torch.allclose(task.predict(model, ROWS["x"]), net(ROWS["x"]), atol=1e-6)  # in batches
    assert task.predict(model, ROWS["x"]).shape == (600, 10)


def test_prediction_changes_nothing_and_training_only_buffers() -> None:
    task = normed_task()
    model, other = task.init(0), task.init(0)
    task.predict(model, ROWS["x"])
    assert same(model, other)
    task.outputs(model, ROWS["x"][:20], training=True)
    assert same(weights(model), weights(other))
    assert model["~body.2.num_batches_tracked"].item() == 1
    assert same(task.init(0), other)
    assert same(task.module.state_dict()["body.2.num_batches_tracked"], torch.tensor(0))


def test_the_loss_is_a_mean_with_optional_row_weights() -> None:
    task = mlp_task()
    model = task.init(0)
    batch = ROWS.batch(torch.arange(4))
    each = task.losses(model, batch)
    assert each.shape == (4,)
    assert torch.allclose(
        task.loss(model, batch), nn.functional.cross_entropy(task.outputs(model, batch["x"]), batch["y"])
    )
    weight = torch.tensor([0.0, 0.0, 4.0, 0.0])
    assert torch.allclose(task.loss(model, batch | {"weight": weight}), each[2])
    assert torch.equal(task.loss(model, batch | {"weight": torch.ones(4)}), task.loss(model, batch))


def test_inputs_are_standardised_before_the_network() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    plain, shifted = Task(net), Task(net, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    x = torch.rand(5, 3, 2, 2)
    byhand = (x - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    assert torch.allclose(shifted.predict(shifted.init(0), x), plain.predict(plain.init(0), byhand), atol=1e-6)


def test_layers_by_kind_with_their_buffers() -> None:
    task = normed_task()
    fields = ("weight", "bias", "~running_mean", "~running_var", "~num_batches_tracked")
    assert task.named(nn.BatchNorm1d) == {f"~body.2.{f[1:]}" if f[0] == "~" else f"body.2.{f}" for f in fields}
    assert task.named(nn.BatchNorm2d) == frozenset()
    assert task.named(nn.Linear) == {"body.1.weight", "body.1.bias", "head.weight", "head.bias"}
    assert Task(nn.Linear(2, 2)).named(nn.Linear) == {"weight", "bias"}


def test_parts_by_name() -> None:
    task = normed_task()
    assert task.part("head") == {"head.weight", "head.bias"}
    assert "~body.2.running_mean" in task.part("body")
    assert task.part("head") | task.part("body") == set(task.init(0))
    with pytest.raises(Mistake, match="submodule 'neck'"):
        task.part("neck")


def test_a_saved_model_is_restored(tmp_path: Path) -> None:
    task = normed_task()
    model = task.init(4)
    model["~body.2.num_batches_tracked"] += 3
    save_file(task.load(model).state_dict(), tmp_path / "m.safetensors")
    assert same(task.restore(tmp_path / "m.safetensors"), model)
    save_file({"head.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(Mistake, match=r"it has no body\.1\.bias"):
        task.restore(tmp_path / "other.safetensors")


def test_a_users_loss_and_metrics() -> None:
    task = Task(
        nn.Linear(2, 1),
        loss=lambda out, y: (out[:, 0] - y) ** 2,
        metrics={"mae": lambda out, y: float((out[:, 0] - y).abs().mean())},
    )
    rows = Rows.of(x=torch.rand(6, 2), y=torch.rand(6))
    model = task.init(0)
    out = task.predict(model, rows["x"])[:, 0]
    actual = task.evaluate(model, rows)
    assert actual == pytest.approx(
        {"loss": ((out - rows["y"]) ** 2).mean().item(), "mae": (out - rows["y"]).abs().mean().item()}
    )


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_tied_weights_are_one_weight() -> None:
    task = Task(Tied)
    model = task.init(0)
    assert list(model) == ["a.weight"]
    x = torch.rand(4, 3)
    assert torch.allclose(task.predict(model, x), x @ model["a.weight"].T @ model["a.weight"].T, atol=1e-6)


@pytest.mark.parametrize("stack", [True, False])
def test_frozen_parameters_are_not_trained(stack: bool) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    net[1].requires_grad_(False)
    task = Task(net)
    with Simulation(skewed(3), stack=stack) as fed:
        result = federate(method("fedavg", task, local=SGD(lr=0.1, batch=16)), fed, 2)
    before, after = net.state_dict(), task.load(result.model).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"3.weight", "3.bias"}
    assert task.size() == 8 * 10 + 10


def test_a_single_vector_is_a_network() -> None:
    assert Task(Vector([1.0, 2.0])).size() == 2


def test_rows_that_are_gathered_in_pieces_give_the_same_outputs_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    task = normed_task()
    params, pieces = task.init(0), []

    def predict(x: Tensor) -> Tensor:
        pieces.append(len(x))
        return task.predict(params, x)

    assert ROWS.gathered_bytes("x") == ROWS["x"].nbytes
    whole = task_module.predict_rows(predict, ROWS)
    monkeypatch.setattr(task_module, "GATHERED", 300 * 64 * 4)
    assert torch.equal(task_module.predict_rows(predict, ROWS), whole)
    assert pieces == [600, 250, 250, 100]  # no evaluation batch is cut in two
    assert task_module.predict_rows(lambda x: None, ROWS) is None


def test_large_rows_are_evaluated_in_smaller_batches() -> None:
    assert task_module.evaluation_batch(torch.zeros(1, 3, 64, 64)) == task_module.EVAL_BATCH
    assert task_module.evaluation_batch(torch.zeros(1, 3, 224, 224)) == 27
    assert task_module.evaluation_batch(torch.zeros(0, 5)) == task_module.EVAL_BATCH
