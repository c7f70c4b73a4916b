"""The local optimiser: torch.optim's arithmetic, the fit's own chance, and nobody else's tensors touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kilter.core import Data, Fit, Node, Params, Rows
from kilter.errors import Mistake
from kilter.fast.fits import run
from kilter.seeds import generator
from kilter.tasks import Task
from kilter.train import SGD, Adam, Fitted, Plan, batches, run_one
from small import Normed, constant, digits, linear_task, mlp_task, near, normed_task, same

ROWS = digits().take(torch.arange(50))


def request(task: Task, plan: Plan, rows: Rows = ROWS, seed: int = 7, **more: Any) -> Fit:
    return Fit(lambda p, batch, _: task.loss(p, batch), more.pop("params", task.init(0)), rows, plan, seed, **more)


def by_torch(task: Task, fit: Fit, optimiser: type[torch.optim.Optimizer], **settings: Any) -> Params:
    """The same batches with a module and torch.optim."""
    net = task.load(fit.params).train()
    optim = optimiser(net.parameters(), **settings)
    torch.manual_seed(fit.seed)
    for at in batches(fit):
        batch = fit.rows.batch(at)
        optim.zero_grad()
        nn.functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
        if fit.plan.clip:
            nn.utils.clip_grad_norm_(net.parameters(), fit.plan.clip)
        optim.step()
    return {task.names[k]: v for k, v in net.state_dict().items()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("make", [mlp_task, normed_task])
def test_sgd_agrees_with_torch(make: Any, momentum: float, weight_decay: float, clip: float) -> None:
    task = make()
    fit = request(task, SGD(lr=0.1, epochs=3, batch=16, momentum=momentum, weight_decay=weight_decay, clip=clip))
    theirs = by_torch(task, fit, torch.optim.SGD, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    ours = run_one(fit).params
    assert same(ours, theirs) if not clip else near(ours, theirs)
    assert not near(ours, fit.params, 1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adam_agrees_with_torch(weight_decay: float) -> None:
    task = mlp_task()
    fit = request(task, Adam(lr=0.01, epochs=3, batch=16, weight_decay=weight_decay, beta1=0.8, beta2=0.99))
    theirs = by_torch(task, fit, torch.optim.Adam, lr=0.01, betas=(0.8, 0.99), weight_decay=weight_decay)
    assert near(run_one(fit).params, theirs, 1e-7)


def test_defaults_of_adam_are_those_of_torch() -> None:
    task = mlp_task()
    fit = request(task, Adam(epochs=2))
    assert near(run_one(fit).params, by_torch(task, fit, torch.optim.Adam), 1e-7)


def test_clip_known_answer() -> None:
    task = linear_task([0.0, 0.0])
    rows = constant([[3.0, 4.0]]).train
    for clip, expected in [(1.0, (-0.6, -0.8)), (10.0, (-3, -4)), (0.0, (-3, -4))]:
        actual = run_one(request(task, SGD(lr=1.0, clip=clip), rows)).params["w"]
        assert actual.tolist() == pytest.approx(expected, rel=1e-5)


# Batches -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(1, 40), st.integers(0, 45), st.integers(1, 3), st.integers(0, 2**62))
def test_every_epoch_uses_every_row_once(n: int, size: int, epochs: int, seed: int) -> None:
    rows = Rows.of(x=torch.arange(n))
    plan = SGD(batch=size, epochs=epochs)
    fit = Fit(lambda *_: torch.zeros(()), {}, rows, plan, seed)
    seen = [rows.batch(at)["x"] for at in batches(fit)]
    assert len(seen) == plan.steps(n)
    assert all(0 < len(s) <= (size + 1 if size else n) for s in seen)  # one more where a last row joins
    per = plan.steps(n) // epochs
    for e in range(epochs):
        assert sorted(torch.cat(seen[e * per : (e + 1) * per]).tolist()) == list(range(n))
    assert same(seen, [rows.batch(at)["x"] for at in batches(fit)])


def test_order_differs_by_epoch_and_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        return [at.tolist() for at in batches(request(mlp_task(), SGD(batch=25, epochs=2), seed=seed))]

    assert order(1)[:2] != order(1)[2:]
    assert order(1) != order(2)


def test_a_partial_batch_is_averaged_over_its_own_rows() -> None:
    # 5 rows in batches of 3: steps on {a, b, c} and {d, e}, each a mean over its own rows.
    task = linear_task([0.0])
    fit = request(task, SGD(lr=1.0, batch=3), constant([[1.0], [10.0], [100.0], [7.0], [3.0]]).train)
    y = fit.rows["y"].flatten()
    first, last = batches(fit)
    assert (len(first), len(last)) == (3, 2)
    assert run_one(fit).params["w"].item() == pytest.approx(-(y[first].mean() + y[last].mean()).item())


# Loss and steps reported ---------------------------------------------------------------------------------------------


def test_reports_the_mean_loss_over_steps() -> None:
    task = linear_task([1.0])  # loss w * g, before each step: 1 * 2, then (1 - .5 * 2) * 2 = 0
    actual = run([request(task, SGD(lr=0.5, epochs=2, batch=0), constant([[2.0]]).train)])
    assert actual == [Fitted({"w": torch.tensor([-1.0])}, 1.0, 2)]


def test_results_are_in_the_order_of_the_fits() -> None:
    task = mlp_task()
    fits = [request(task, SGD(lr=0.1, batch=16), digits().take(torch.arange(k, k + 30)), seed=k) for k in range(3)]
    alone = [run([fit])[0].params for fit in fits]
    together = [actual.params for actual in run(fits)]
    assert all(near(a, b, 1e-5) for a, b in zip(alone, together, strict=True))
    assert not near(together[0], together[1], 1e-3)


def test_gradient_of_a_weight_the_loss_does_not_use_is_zero() -> None:
    params = {"used": torch.ones(1), "idle": torch.ones(2)}
    fit = Fit(lambda p, *_: p["used"].sum(), params, ROWS, SGD(lr=0.5, batch=0), 0)
    assert same(run_one(fit).params, {"used": torch.tensor([0.5]), "idle": torch.ones(2)})


# Chance --------------------------------------------------------------------------------------------------------------


def test_dropout_follows_from_the_seed_of_the_fit() -> None:
    task = normed_task()
    fit = request(task, SGD(lr=0.1, batch=16))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run_one(fit).params
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.rand(3)
    assert same(run_one(fit).params, first)
    assert not near(run_one(replace(fit, seed=8)).params, first, 1e-4)


def test_dropout_differs_by_seed_even_with_one_batch() -> None:
    task = normed_task()
    fit = request(task, SGD(lr=0.1, batch=0))
    assert not near(run_one(fit).params, run_one(replace(fit, seed=8)).params, 1e-5)


# Whose tensors -------------------------------------------------------------------------------------------------------


def test_the_input_params_are_not_modified() -> None:
    task = normed_task()
    given = task.init(0)
    copy = {k: v.clone() for k, v in given.items()}
    actual = run_one(request(task, SGD(lr=0.1, momentum=0.9), params=given)).params
    assert same(given, copy)
    assert not any(v.requires_grad for v in [*given.values(), *actual.values()])
    assert not {v.data_ptr() for v in actual.values()} & {v.data_ptr() for v in given.values()}


def test_only_selected_parameters_are_trained() -> None:
    task = mlp_task()
    start = task.init(0)
    head = task.part("head")
    actual = run_one(request(task, SGD(lr=0.1, momentum=0.9, weight_decay=0.1), train=head)).params
    for name, value in start.items():
        assert torch.equal(actual[name], value) == (name not in head)


def test_training_part_of_a_model_equals_training_it_with_the_rest_held() -> None:
    task = mlp_task()
    fit = request(task, SGD(lr=0.1, batch=16, epochs=2), train=task.part("head"))
    net = task.load(fit.params).train()
    optim = torch.optim.SGD(net.head.parameters(), lr=0.1)
    for at in batches(fit):
        batch = fit.rows.batch(at)
        optim.zero_grad()
        nn.functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
        optim.step()
    assert same(run_one(fit).params, {task.names[k]: v for k, v in net.state_dict().items()})


def test_batchnorm_statistics_follow_every_step_once() -> None:
    task = normed_task()
    fit = request(task, SGD(lr=0.1, batch=16, epochs=2))
    actual = run_one(fit).params
    assert actual["~body.2.num_batches_tracked"].item() == fit.plan.steps(len(ROWS)) == 8
    one = run_one(request(task, SGD(lr=0.1, batch=0))).params
    hidden = Normed().body[:2]
    hidden.load_state_dict({k: fit.params[f"body.{k}"] for k in ("1.weight", "1.bias")})
    expected = 0.1 * hidden(ROWS["x"]).mean(0)  # momentum .1 from 0
    assert torch.allclose(one["~body.2.running_mean"], expected, atol=1e-6)


def test_buffers_are_never_trained_even_if_named() -> None:
    task = normed_task()
    fit = request(task, SGD(lr=0.1, weight_decay=0.5), train=frozenset(task.names.values()))
    free = run_one(replace(fit, train=None)).params
    assert same(run_one(fit).params, free)


# Plans ---------------------------------------------------------------------------------------------------------------


def test_the_learning_rate_decays_by_round_from_the_first() -> None:
    plan = SGD(lr=1.0, decay=0.5)
    assert [plan.at(r).lr for r in (0, 1, 2, 3)] == [1, 1, 0.5, 0.25]
    steady = SGD(lr=1.0)
    assert steady.at(9) is steady


def test_a_nodes_fit_uses_the_plan_of_its_round() -> None:
    node = Node("a", Data(ROWS, ROWS, ROWS), round=3)
    assert node.fit(lambda *_: torch.zeros(()), {}, SGD(lr=1.0, decay=0.5)).plan.lr == 0.25


@given(
    st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.9, 0.99]), st.integers(1, 3), st.integers(0, 4), st.integers(1, 9)
)
def test_travel_is_the_distance_of_a_constant_gradient(n: int, m: float, epochs: int, size: int, round: int) -> None:
    plan = SGD(lr=0.1, momentum=m, epochs=epochs, batch=size, decay=0.9).at(round)
    task = linear_task([0.0])
    y = run_one(request(task, plan, constant([[1.0]] * n).train)).params["w"]
    assert -y.item() == pytest.approx(plan.travel(n), rel=1e-4)


def test_adam_has_no_travel() -> None:
    with pytest.raises(Mistake, match="use SGD"):
        Adam().travel(10)


# Requests ------------------------------------------------------------------------------------------------------------


def test_every_fit_has_its_own_seed() -> None:
    def seeds(id: str, round: int, step: str, seed: int = 0) -> list[int]:
        node = Node(id, Data(ROWS, ROWS, ROWS), seed=seed, round=round, step=step)
        return [node.fit(lambda *_: torch.zeros(()), {}, SGD()).seed for _ in range(2)]

    places = [
        ("a", 1, "train"),
        ("b", 1, "train"),
        ("a", 2, "train"),
        ("a", 1, "judge"),
        ("a", 11, "train"),
        ("a1", 1, ""),
    ]
    actual = [s for place in places for s in seeds(*place)] + seeds("a", 1, "train", seed=1)
    assert len(set(actual)) == len(actual)
    assert seeds("a", 1, "train") == seeds("a", 1, "train")


def test_columns_join_the_batches_of_their_own_rows() -> None:
    node = Node("a", Data(ROWS, ROWS, ROWS))
    fit = node.fit(lambda *_: torch.zeros(()), {}, SGD(batch=8), weight=ROWS.index.float())
    for at in batches(fit):
        batch = fit.rows.batch(at)
        assert torch.equal(batch["weight"], ROWS.index[at].float())
        assert torch.equal(batch["x"], ROWS["x"][at])
    with pytest.raises(ValueError, match="3 entries for 50 rows"):
        node.fit(lambda *_: torch.zeros(()), {}, SGD(), weight=torch.ones(3))


def test_the_generator_of_a_node_depends_on_the_step() -> None:
    node = Node("a", Data(ROWS, ROWS, ROWS), seed=1, round=2, step="train")
    assert torch.equal(torch.rand(3, generator=node.rng), torch.rand(3, generator=node.rng))
    assert torch.equal(torch.rand(3, generator=node.rng), torch.rand(3, generator=generator(1, 2, "a", "train")))
    assert not torch.equal(torch.rand(3, generator=node.rng), torch.rand(3, generator=generator(1, 2, "a", "judge")))


@pytest.mark.parametrize(
    ("rows", "size", "lengths"),
    [(33, 32, [33]), (65, 32, [32, 33]), (64, 32, [32, 32]), (3, 1, [1, 1, 1]), (34, 32, [32, 2])],
)
def test_a_single_last_row_joins_the_previous_batch(rows, size, lengths):
    """So that BatchNorm never meets a batch of one; and `steps` knows."""
    plan = SGD(batch=size, epochs=2)
    fit = Fit(lambda p, b, c: 0, {}, Rows.of(x=torch.zeros(rows, 1)), plan, seed=1)
    actual = [b if isinstance(b, slice) else b.tolist() for b in batches(fit)]
    assert [len(b) for b in actual] == lengths * 2
    assert sorted(i for b in actual[: len(lengths)] for i in b) == list(range(rows))
    assert plan.steps(rows) == len(actual)
