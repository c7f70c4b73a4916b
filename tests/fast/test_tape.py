"""Computations written down: the same bits on other numbers, and nothing written down that may be another computation next time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from kilter.core import Fit, Rows
from kilter.fast import stack
from kilter.fast.tape import Product, Tapes, plain, recorded
from kilter.tasks import Task
from kilter.train import SGD, run_one

Formula = Callable[[Sequence[Tensor]], list[Tensor]]


def numbers(seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=rng), torch.randn(4, 4, generator=rng), torch.rand(3, generator=rng)]


def product(t: Sequence[Tensor]) -> list[Tensor]:
    return [t[0] @ t[1], (t[0].relu() * t[2].unsqueeze(1)).sum(0)]


def gradient(t: Sequence[Tensor]) -> list[Tensor]:
    w = t[1].detach().requires_grad_()
    loss = F.softplus(t[0] @ w).square().mean() + 0.1 * w.square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [w])]


def in_place(t: Sequence[Tensor]) -> list[Tensor]:
    t[2].add_(1)
    view = t[1].t()[1:]
    view.mul_(2)
    return [t[1].sum(1), view + t[2][0]]


def halves(t: Sequence[Tensor]) -> list[Tensor]:
    a, b = t[1].chunk(2)
    largest, at = t[0].max(1)
    return [a - b, largest, at]


def normed(t: Sequence[Tensor]) -> list[Tensor]:
    """Running statistics are written to."""
    mean, var = t[1][0], t[1][1].abs_()
    return [F.batch_norm(t[0], mean, var, training=True)]


@pytest.mark.parametrize("formula", [product, gradient, in_place, halves, normed])
@given(seed=st.integers(0, 100))
def test_a_tape_gives_the_same_bits_on_other_numbers(formula: Formula, seed: int) -> None:
    mine, theirs = numbers(seed), numbers(seed)
    _, tape = recorded(formula, numbers(seed + 1))
    assert tape is not None
    for a, b in zip([*map(plain, tape(*mine)), *mine], [*formula(theirs), *theirs], strict=True):
        assert torch.equal(a, b)


def test_the_first_time_is_like_any_other() -> None:
    for formula in (product, in_place, gradient):
        for k in range(2):
            tapes, mine, theirs = Tapes(), numbers(k), numbers(k)
            actual = [plain(r) for r in tapes.run("a", formula, mine)]
            assert all(torch.equal(a, b) for a, b in zip([*actual, *mine], [*formula(theirs), *theirs], strict=True))


def test_what_draws_draws_once() -> None:
    tapes, rng, again = Tapes(), torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)

    def drawn(rng: torch.Generator) -> Formula:
        return lambda t: [t[0].add_(torch.rand(4, generator=rng))]

    for k in range(3):
        mine, theirs = numbers(k), numbers(k)
        (actual,) = tapes.run("a", drawn(rng), mine)
        assert torch.equal(plain(actual), drawn(again)(theirs)[0])
        assert torch.equal(mine[0], theirs[0])


def test_a_number_that_torch_was_not_seen_to_compute_is_no_constant() -> None:
    _, tape = recorded(lambda t: [t[0] + torch.from_numpy(t[1].detach().numpy()[:3].copy())], numbers(0))
    assert tape is None


def test_a_product_that_is_but_a_result_is_given_as_its_factors() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    formulas: list[tuple[Formula, list[bool]]] = [
        (lambda t: [torch.bmm(*t)], [True]),
        (lambda t: [(c := torch.bmm(*t)), c.sum()], [False, False]),
        (lambda t: [(c := torch.bmm(*t)), c], [False, False]),
        (lambda t: [torch.bmm(*t), t[0].mul_(2)], [False, False]),  # a factor that changes
        (lambda t: [torch.bmm(t[0], t[1]) + 0], [False]),
    ]
    for formula, expected in formulas:
        _, tape = recorded(formula, [a.clone(), b])
        assert tape is not None
        assert [isinstance(r, Product) for r in tape(a.clone(), b)] == expected


@pytest.mark.parametrize(
    "formula",
    [
        lambda t: [t[0] + torch.rand(4)],
        lambda t: [F.dropout(t[0])],
        lambda t: [t[0] * t[2].max().item()],
        lambda t: [t[0] if bool(t[2][0] > 0.5) else -t[0]],
        lambda t: [t[0] * sum(t[2].tolist())],
        lambda t: [t[0] * float(np.asarray(t[2]).sum())],
        lambda t: [t[0] * float(t[2].numpy().sum())],
        lambda t: [t[0][t[0] > 0]],
        lambda t: [t[0] * torch.equal(t[2], t[2])],
    ],
    ids=["chance", "dropout", "item", "branch", "list", "array", "numpy", "mask", "equal"],
)
def test_what_may_be_another_computation_is_not_written_down(formula: Formula) -> None:
    assert recorded(formula, numbers(0))[1] is None


def test_constants_of_a_loss_are_kept_as_they_are() -> None:
    constant = torch.ones(4)
    _, tape = recorded(lambda t: [t[0] + constant], numbers(0))
    constant += 1
    x = numbers(1)
    assert tape is not None
    assert torch.equal(plain(tape(*x)[0]), x[0] + 2)


def test_once_written_down_python_is_not_asked() -> None:
    tapes, calls = Tapes(), []

    def formula(t: Sequence[Tensor]) -> list[Tensor]:
        calls.append(1)
        return product(t)

    for k in range(3):
        assert torch.equal(plain(tapes.run("a", formula, numbers(k))[0]), product(numbers(k))[0])
    assert len(calls) == 2  # and rehearsed
    tapes.run("b", formula, numbers(0))
    assert len(calls) == 4


# in a stack -----------------------------------------------------------------------------------------------------------


def fits(loss: Callable[..., Tensor], task: Task, ctxs: Sequence[object]) -> list[Fit]:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(120, 3, generator=rng), torch.randint(0, 2, (120,), generator=rng)
    rows = [Rows({"x": x, "y": y}, torch.arange(k * 30, k * 30 + 30)) for k in range(4)]
    return [
        Fit(loss, task.init(0), r, SGD(lr=0.1, batch=6), seed=k, ctx=c)
        for k, (r, c) in enumerate(zip(rows, ctxs, strict=True))
    ]


TASK = Task(lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))


def pulled(w: dict[str, Tensor], batch: dict[str, Tensor], ctx: dict[str, Tensor]) -> Tensor:
    """Towards one place, away from another."""
    towards = sum((v - ctx["to"][k]).square().sum() for k, v in w.items() if k in ctx["to"])  # type: ignore[index]
    away = sum((v - ctx["from"][k]).square().sum() for k, v in w.items() if k in ctx["from"])  # type: ignore[index]
    return TASK.loss(w, batch) + ctx["rate"] * (towards - 0.5 * away)  # type: ignore[no-any-return]


def context(seed: int, same: bool, rate: float) -> dict[str, object]:
    torch.manual_seed(seed)
    to = {"0.weight": torch.randn(8, 3)}
    return {"to": to, "from": to if same else {"0.weight": torch.randn(8, 3)}, "rate": rate}


def test_what_the_context_holds_is_never_taken_from_an_earlier_round() -> None:
    """One tensor in two places, then two; another rate; other tensors: always what one-by-one training gives."""
    for seed, same, rate in [
        (0, True, 0.01),
        (0, True, 0.01),
        (0, False, 0.01),
        (1, False, 0.01),
        (1, False, 0.02),
        (2, True, 0.02),
    ]:
        ready = fits(pulled, TASK, [context(seed, same, rate)] * 4)
        together = stack.run_stack(ready)
        assert together is not None
        for fit, actual in zip(ready, together, strict=True):
            alone = run_one(fit)
            for k, v in alone.params.items():
                assert torch.allclose(v.float(), actual.params[k].float(), atol=1e-5), (seed, same, rate, k)
            assert actual.loss == pytest.approx(alone.loss, abs=1e-5)


@pytest.mark.parametrize(
    "plan", [SGD(lr=0.1, batch=6, momentum=0.5), SGD(lr=0.1, batch=6, clip=0.5), SGD(lr=0.1, batch=6)]
)
def test_a_tape_changes_no_bit_of_a_stack_but_where_products_are_added(
    plan: SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = [replace(f, plan=plan) for f in fits(pulled, TASK, [context(k, False, 0.01) for k in range(4)])]

    def trained() -> list[Tensor]:
        actual = stack.run_stack(ready)
        assert actual is not None
        return [v for f in actual for v in f.params.values()]

    first, second = trained(), trained()  # the first was written down
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(Tapes, "run", lambda self, key, compute, inputs: compute(inputs))
    same = torch.equal if plan.rate is None else partial(torch.allclose, atol=1e-6)
    assert all(same(a, b) for a, b in zip(first, trained(), strict=True))


def test_a_weight_that_is_a_factor_of_anothers_gradient() -> None:
    task = Task(lambda: nn.Linear(3, 2))

    def loss(w: dict[str, Tensor], batch: dict[str, Tensor], ctx: None) -> Tensor:
        return F.linear(w["weight"], w["weight2"]).square().sum() + task.loss(
            {k: w[k] for k in ("weight", "bias")}, batch
        )

    ready = [replace(f, params={**f.params, "weight2": torch.ones(5, 3)}) for f in fits(loss, task, [None] * 4)]
    together = stack.run_stack(ready)
    assert together is not None
    for fit, actual in zip(ready, together, strict=True):
        assert all(torch.allclose(v, actual.params[k], atol=1e-5) for k, v in run_one(fit).params.items())


def test_a_module_that_draws_is_trained_without_a_tape() -> None:
    task = Task(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))

    def loss(w: dict[str, Tensor], batch: dict[str, Tensor], ctx: None) -> Tensor:
        return F.cross_entropy(functional_call(task.module.train(), w, (batch["x"],)), batch["y"])

    for _ in range(2):
        together = stack.run_stack(fits(loss, task, [None] * 4))
    assert together is not None
    for fit, actual in zip(fits(loss, task, [None] * 4), together, strict=True):
        assert all(torch.allclose(v, actual.params[k], atol=1e-5) for k, v in run_one(fit).params.items())


@pytest.mark.parametrize("plan", [SGD(lr=0.1, batch=6), SGD(lr=0.1, batch=6, momentum=0.9), SGD(batch=0)])
@pytest.mark.parametrize("sizes", [(30, 30, 30, 30), (30, 30, 7, 0), (5, 5, 2, 1)])
@pytest.mark.parametrize("alike", [True, False])
def test_clients_that_begin_alike_or_not_and_some_that_never_begin(
    plan: SGD, sizes: tuple[int, ...], alike: bool
) -> None:
    task = Task(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    ready = []
    for k, fit in enumerate(fits(lambda w, b, _: task.loss(w, b), task, [None] * 4)):
        params = {n: v + (0.0 if alike else 0.01 * k) for n, v in fit.params.items()}
        ready.append(replace(fit, plan=plan, params=params, rows=fit.rows.take(torch.arange(sizes[k]))))
    before = [{n: v.clone() for n, v in f.params.items()} for f in ready]
    together = stack.run_stack(ready)
    assert together is not None
    for fit, actual, first in zip(ready, together, before, strict=True):
        assert all(torch.equal(v, first[n]) for n, v in fit.params.items())  # what is given is not written on
        if len(fit.rows):
            assert all(torch.allclose(v, actual.params[n], atol=1e-5) for n, v in run_one(fit).params.items())
        else:
            assert all(torch.equal(v, first[n]) for n, v in actual.params.items())
