"""Stacked training is one-by-one training, up to rounding: for every method, network, optimiser and loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad

from kilter.core import Fit, Params, Rows
from kilter.fast import switch
from kilter.fast.chunks import compose, width
from kilter.fast.fits import run
from kilter.fast.stack import groups, kind, run_stack
from kilter.federate import federate
from kilter.methods import methods
from kilter.models import build
from kilter.params import sq_norm, sub, weights
from kilter.tasks import Task
from kilter.train import SGD, Adam, Fitted, Plan, run_one
from small import bits, digits, federation, method, mlp_task, near, normed_task, same, skewed, topologies

TOLERANCE = 2e-5  # of numbers of size one, after some ten steps; momentum and BatchNorm carry rounding on
SIZES = (50, 16, 50, 34, 7)  # rows of the clients: equal ones, less than a batch, partial last batches


def net(name: str) -> Task:
    return Task(lambda: build(name, (1, 8, 8), 10))


def requests(task: Task, plan: Plan, loss: Any = None, sizes: tuple[int, ...] = SIZES, **more: Any) -> list[Fit]:
    """One fit a client, each from weights of its own, on rows of its own."""
    start, made, at = task.init(0), [], 0
    chosen = loss or (lambda p, batch, _: task.loss(p, batch))
    for k, n in enumerate(sizes):
        own = {
            name: v + 0.01 * torch.randn(v.shape, generator=torch.Generator().manual_seed(k)) if v.dim() > 1 else v
            for name, v in start.items()
        }
        made.append(Fit(chosen, own, digits().take(torch.arange(at, at + n)), plan, 100 + k, **more))
        at += n
    return made


def agree(fits: list[Fit], tolerance: float = TOLERANCE) -> list[Fitted]:
    """Trained stacked and one by one, and compared."""
    stacked, alone = run_stack(fits), [run_one(fit) for fit in fits]
    assert stacked is not None
    for a, b in zip(stacked, alone, strict=True):
        assert near(a.params, b.params, tolerance)
        assert a.steps == b.steps
        assert a.loss == pytest.approx(b.loss, abs=tolerance)
        assert all(a.params[k].dtype == v.dtype and not a.params[k].requires_grad for k, v in b.params.items())
    return stacked


ALONE: set[str] = set()  # methods whose loss cannot be stacked, and say so

# Methods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(methods()))
@pytest.mark.parametrize("make", [mlp_task, normed_task])
def test_every_method_gives_the_same_stacked(name: str, make: Callable[[], Task], caplog: Any) -> None:
    switch.forget_reports()
    actual = []
    for stacked in (True, False):
        with federation(stack=stacked, topology=topologies(name)[0]) as fed:
            result = federate(method(name, make()), fed, rounds=2)
            actual.append((tensors(result.state), {i: tensors(s) for i, s in fed.states.items()}, result.rounds))
    (state, kept, rounds), (state_alone, kept_alone, rounds_alone) = actual
    assert near(state, state_alone, TOLERANCE)
    assert kept.keys() == kept_alone.keys()
    assert all(near(kept[i], kept_alone[i], 10 * TOLERANCE) for i in kept)
    assert [r.loss for r in rounds] == pytest.approx([r.loss for r in rounds_alone], abs=TOLERANCE)
    assert bool([r for r in caplog.records if "cannot be stacked" in r.message]) == (name in ALONE)


def tensors(tree: Any) -> Params:
    from kilter.trees import leaves

    return {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, Tensor)}


# Networks and optimisers ---------------------------------------------------------------------------------------------

PLANS = {
    "sgd": SGD(lr=0.05, batch=16),
    "momentum": SGD(lr=0.05, batch=16, epochs=3, momentum=0.9, weight_decay=0.01),
    "clip": SGD(lr=0.2, batch=16, epochs=2, clip=0.5),
    "adam": Adam(lr=1e-3, batch=16, epochs=2, weight_decay=0.01),
    "all rows": SGD(lr=0.05, batch=0, epochs=3),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", ["linear", "mlp:16:2", "bench-cnn", "cnn", "simple-cnn"])
def test_networks_and_optimisers(name: str, plan: Plan) -> None:
    agree(requests(net(name), plan), TOLERANCE if name != "cnn" else 10 * TOLERANCE)


class Mixed(nn.Module):
    """Layers whose stacked form is our own, in forms the papers' networks do not use, among others that are torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding="same", dilation=2)
        self.by_group = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False)
        self.group = nn.GroupNorm(2, 8)
        self.batch = nn.BatchNorm2d(8, affine=False, momentum=0.3)
        self.loose = nn.BatchNorm2d(8, track_running_stats=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.layer = nn.LayerNorm(8)
        self.out = nn.Linear(8, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.by_group(torch.tanh(self.first(x))))
        x = self.pool(self.loose(nn.functional.gelu(self.batch(x))))
        x = nn.functional.avg_pool2d(x, 2)
        return self.out(self.layer(x.movedim(1, -1)).mean((1, 2)))


def test_layers_in_unusual_forms() -> None:
    agree(requests(Task(Mixed), SGD(lr=0.05, batch=16, epochs=2)), 10 * TOLERANCE)


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_residual_networks(norm: str) -> None:
    # One step: in float32 these networks are some 1e-3 of the update away from float64 after two, however they are computed.
    agree(requests(net(f"resnet18:{norm}"), SGD(lr=0.01, batch=0), sizes=(16, 12)), 1e-3)


def test_attention_over_sequences() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(8, 16)
            self.mix = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
            self.out = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mix(self.into(x[:, 0])).mean(1))

    agree(requests(Task(Words), SGD(lr=0.05, batch=16, epochs=2)))


def test_batchnorm_keeps_everyones_own_statistics() -> None:
    actual = agree(requests(normed_task(), SGD(lr=0.1, batch=16, epochs=2)))
    means = [f.params["~body.2.running_mean"] for f in actual]
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in pairwise(means))
    assert (
        [int(f.params["~body.2.num_batches_tracked"]) for f in actual] == [f.steps for f in actual] == [8, 2, 8, 6, 2]
    )


def test_frozen_parts_stay() -> None:
    task = mlp_task()
    fits = requests(task, SGD(lr=0.1, batch=16, momentum=0.9), train=task.part("head"))
    for fit, actual in zip(fits, agree(fits), strict=True):
        assert all(torch.equal(actual.params[k], v) == (k not in task.part("head")) for k, v in fit.params.items())


def test_what_was_given_is_not_modified() -> None:
    fits = requests(normed_task(), SGD(lr=0.1, batch=16, momentum=0.9))
    before = [{k: v.clone() for k, v in fit.params.items()} for fit in fits]
    agree(fits)
    assert same([fit.params for fit in fits], before)


@pytest.mark.parametrize("plan", [SGD(lr=0.1, batch=16), SGD(lr=0.1, batch=16, momentum=0.9, epochs=2)])
def test_clients_that_begin_with_the_same_weights(plan: Plan) -> None:
    """They may be one object or equal ones, for who shares an object depends on how messages travelled."""
    fits = [replace(f, params=net("mlp:16").init(0)) for f in requests(net("mlp:16"), plan)]
    one = [replace(f, params=fits[0].params) for f in fits]
    assert same([f.params for f in agree(fits)], [f.params for f in agree(one)])
    last = list(fits[0].params)[-1]
    agree([replace(f, params=f.params | {last: f.params[last] + k}) for k, f in enumerate(fits)])  # all but one


def test_a_client_that_diverges_does_not_harm_the_others() -> None:
    for name in ("bench-cnn", "mlp:16"):
        fits = requests(net(name), SGD(lr=0.05, batch=16))
        fits[2] = replace(fits[2], params={k: v * torch.nan for k, v in fits[2].params.items()})
        actual = run_stack(fits)
        assert actual is not None
        for k, fit in enumerate(fits):
            assert k == 2 or near(actual[k].params, run_one(fit).params, TOLERANCE)


# Chance --------------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Every kind of chance a loss may draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop2d = nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3)
        self.drop, self.out = nn.Dropout(0.4, inplace=True), nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop2d(self.conv(x)).flatten(1)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape) + 0.1 * torch.randn(144)
        return self.out(self.drop(x))


def test_chance_is_the_clients_own() -> None:
    fits = requests(Task(Noisy), SGD(lr=0.05, batch=16, epochs=2))
    actual = agree(fits)
    other = run_stack([replace(fits[0], seed=1), *fits[1:]])
    assert other is not None
    assert not near(other[0].params, actual[0].params, 1e-3)
    assert all(same(a.params, b.params) for a, b in zip(other[1:], actual[1:], strict=True))


def test_torchs_own_dice_are_left_alone() -> None:
    before = torch.get_rng_state()
    agree(requests(Task(Noisy), SGD(lr=0.05, batch=16)))
    assert torch.equal(torch.get_rng_state(), before)


# Losses --------------------------------------------------------------------------------------------------------------

TASK = mlp_task()


def with_norm(p: Params, batch: dict[str, Tensor], anchor: Params) -> Tensor:
    """A square root: not additive over clients."""
    return TASK.loss(p, batch) + 0.1 * sq_norm(sub(anchor, p)).sqrt()


def with_contrast(p: Params, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Compared with a model all have (shared) and one's own last (not shared)."""
    z, near_to, far = (TASK.outputs(m, batch["x"]) for m in (p, ctx["all"], ctx["own"]))
    a, b = nn.functional.cosine_similarity(z, near_to), nn.functional.cosine_similarity(z, far)
    return TASK.loss(p, batch) - torch.log_softmax(torch.stack([a, b]) / 0.5, 0)[0].mean()


def with_scale(p: Params, batch: dict[str, Tensor], ctx: tuple[Params, float, list[int], None]) -> Tensor:
    """Plain values of one's own, and some that all share."""
    return (1 + ctx[1]) * TASK.loss(p, batch) + ctx[1] / ctx[2][0] * sq_norm(sub(ctx[0], p))


def with_gradient(p: Params, batch: dict[str, Tensor], _: Any) -> Tensor:
    """A gradient within the loss."""
    own = grad(lambda x: TASK.loss(p, batch | {"x": x}))(batch["x"])
    return TASK.loss(p, batch) + own.square().sum()


def with_old_gradient(p: Params, batch: dict[str, Tensor], _: Any) -> Tensor:
    """The same by the older interface."""
    x = (0.9 * batch["x"]).requires_grad_()
    (slope,) = torch.autograd.grad(TASK.loss(p, batch | {"x": x}), x, create_graph=True)
    return TASK.loss(p, batch) + slope.square().sum()


def own(fits: list[Fit], ctx: Callable[[int, Fit], Any]) -> list[Fit]:
    return [replace(fit, ctx=ctx(k, fit)) for k, fit in enumerate(fits)]


PLAN = SGD(lr=0.05, batch=16, epochs=2)


def test_losses_that_are_not_sums_over_clients() -> None:
    start = weights(TASK.init(3))
    agree(own(requests(TASK, PLAN, with_norm), lambda k, fit: start))
    agree(own(requests(TASK, PLAN, with_norm), lambda k, fit: {n: v + k for n, v in start.items()}))
    agree(own(requests(TASK, PLAN, with_contrast), lambda k, fit: {"all": start, "own": TASK.init(k)}))


def test_plain_values_in_the_constants() -> None:
    start = weights(TASK.init(3))
    agree(own(requests(TASK, PLAN, with_scale), lambda k, fit: (start, 0.1 * k, [2], None)))
    agree(own(requests(TASK, PLAN, with_scale), lambda k, fit: (start, 0.1, [2], None)))


def test_columns_and_tables_of_ones_own() -> None:
    fits = requests(TASK, PLAN)
    fits = [
        replace(fit, rows=fit.rows.extend(weight=torch.linspace(0.5 + k, 2, len(fit.rows))))
        for k, fit in enumerate(fits)
    ]
    agree(fits)
    agree([replace(fit, rows=Rows.of(**fit.rows.batch())) for fit in fits])


def test_bytes_become_floats_as_they_do_alone() -> None:
    tables = {"x": (digits()["x"] * 255).to(torch.uint8), "y": digits()["y"]}
    agree([replace(fit, rows=Rows(tables, fit.rows.index)) for fit in requests(TASK, PLAN)])


# What is stacked with what -------------------------------------------------------------------------------------------


def plain(p: Params, batch: dict[str, Tensor], _: Any) -> Tensor:
    return TASK.loss(p, batch)


def test_only_fits_of_one_kind_are_stacked() -> None:
    fits = requests(TASK, PLAN, plain)
    fits[1] = replace(fits[1], plan=replace(PLAN, lr=0.1))
    fits[2] = replace(fits[2], ctx=torch.ones(2))
    fits[3] = replace(fits[3], loss=lambda p, batch, _: TASK.loss(p, batch))
    fits[4] = replace(fits[4], train=TASK.part("head"))
    assert len({kind(fit) for fit in fits}) == 5
    assert groups([*fits, fits[1]]) == [[0], [1, 5], [2], [3], [4]]
    actual = run([*fits, fits[1]])
    assert all(near(a.params, run_one(f).params, TOLERANCE) for a, f in zip(actual, [*fits, fits[1]], strict=True))


def test_stacks_are_as_wide_as_the_network_is_small() -> None:
    wide, narrow = width(TASK.init(0)), width(net("bench-cnn").init(0))
    assert wide > narrow > 1 == width(net("resnet18").init(0))
    sizes = [len(s) for s in groups(requests(TASK, PLAN, plain, (3,) * (2 * wide + 2)))]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 1


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 99), min_size=1), st.integers(1, 7))
def test_chunks_hold_everyone_once_whatever_the_order(rows: dict[str, int], most: int) -> None:
    chunks = compose(rows, most)
    assert sorted(i for chunk in chunks for i in chunk) == sorted(rows)
    assert all(0 < len(chunk) <= most for chunk in chunks)
    assert all(len(c) == 1 or sum(rows[i] for i in c) <= sum(rows.values()) / 2 for c in chunks)
    assert compose(dict(reversed(rows.items())), most) == chunks


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_the_number_of_workers_does_not_show(name: str) -> None:
    actual = []
    for workers in (1, 2, 3):
        with federation(skewed(9), workers=workers) as fed:
            result = federate(method(name, net("cnn"), cohort=0.8), fed, rounds=2)
            actual.append([tensors(result.state), fed.states])
    assert same(actual[0], actual[1])
    assert same(actual[0], actual[2])


# What cannot be stacked ----------------------------------------------------------------------------------------------


def by_value(p: Params, batch: dict[str, Tensor], _: Any) -> Tensor:
    """Looks at a number, which a stack does not have."""
    loss = TASK.loss(p, batch)
    return loss if float(loss.detach()) > 0 else 2 * loss


def test_falls_back_with_one_note(caplog: Any) -> None:
    switch.forget_reports()
    fits = requests(TASK, PLAN, by_value)
    with caplog.at_level(logging.INFO, logger="kilter"):
        actual = run(fits)
        assert same([f.params for f in actual], [run_one(fit).params for fit in fits])
        run(fits)
    (note,) = [r.message for r in caplog.records]
    assert "by_value cannot be stacked" in note


def test_a_gradient_within_a_loss_is_right_one_way_or_the_other() -> None:
    agree(requests(TASK, PLAN, with_gradient))
    fits = requests(TASK, PLAN, with_old_gradient)
    assert all(near(a.params, run_one(fit).params, TOLERANCE) for a, fit in zip(run(fits), fits, strict=True))


def test_a_wrong_loss_says_so() -> None:
    def wrong(p: Params, batch: dict[str, Tensor], _: Any) -> Tensor:
        raise ValueError("a bug of the loss")

    with pytest.raises(ValueError, match="a bug of the loss"):
        run(requests(TASK, PLAN, wrong))


def test_a_single_client_is_trained_as_it_would_be_alone() -> None:
    (fit,) = requests(TASK, PLAN, sizes=(40,))
    assert torch.equal(bits(run([fit])[0].params["head.weight"]), bits(run_one(fit).params["head.weight"]))
