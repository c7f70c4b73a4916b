"""AdamW, optimisers of torch.optim by name, schedules and gradient accumulation: torch.optim is the referee over 50 steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from kilter.core import Fit, Params, Rows
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.fast.fits import run
from kilter.tasks import Task
from kilter.train import NOT_SUPPORTED, SGD, Adam, AdamW, Plan, TorchOptimiser, batches, plan_class, run_one
from small import digits, mlp_task, near, same

ROWS = digits().take(torch.arange(160))
PLANS: list[tuple[Plan, str, dict[str, Any]]] = [
    (SGD(lr=0.1, momentum=0.9, weight_decay=0.01, epochs=10, batch=32), "SGD", {"momentum": 0.9, "weight_decay": 0.01}),
    (Adam(lr=0.01, weight_decay=0.01, epochs=10, batch=32), "Adam", {"weight_decay": 0.01}),
    (AdamW(lr=0.01, weight_decay=0.1, epochs=10, batch=32), "AdamW", {"weight_decay": 0.1}),
    (
        TorchOptimiser(name="RMSprop", lr=0.001, options="alpha=0.9,momentum=0.5", epochs=10, batch=32),
        "RMSprop",
        {"alpha": 0.9, "momentum": 0.5},
    ),
    (TorchOptimiser(name="NAdam", lr=0.002, epochs=10, batch=32), "NAdam", {}),
]


def request(task: Task, plan: Plan, rows: Rows = ROWS, seed: int = 7) -> Fit:
    return Fit(lambda p, batch, _: task.loss(p, batch), task.init(0), rows, plan, seed)


def by_torch(task: Task, fit: Fit, name: str, rates: list[float] | None = None, **settings: Any) -> Params:
    """The same batches with a module and torch.optim."""
    net = task.load(fit.params).train()
    optimiser = getattr(torch.optim, name)(net.parameters(), lr=fit.plan.lr, **settings)
    for t, at in enumerate(batches(fit)):
        batch = fit.rows.batch(at)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
        if rates:
            optimiser.param_groups[0]["lr"] = rates[t]
        optimiser.step()
    return {task.names[k]: v for k, v in net.state_dict().items()}


@pytest.mark.parametrize(("plan", "name", "settings"), PLANS, ids=[name for _, name, _ in PLANS])
def test_fifty_steps_agree_with_torch_stacked_and_not(plan: Plan, name: str, settings: dict[str, Any]) -> None:
    task = mlp_task()
    fit = request(task, plan)
    assert plan.steps(len(ROWS)) == 50
    theirs = by_torch(task, fit, name, **settings)
    assert near(run_one(fit).params, theirs, 1e-6)
    loss = fit.loss
    both = [Fit(loss, fit.params, fit.rows, plan, seed) for seed in (7, 8)]
    stacked = run(both)
    assert near(stacked[0].params, theirs, 1e-6)
    assert not near(stacked[1].params, theirs, 1e-4)


OTHERS = sorted(
    key
    for key, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key not in NOT_SUPPORTED
)


@pytest.mark.parametrize("name", OTHERS)
def test_every_class_of_torch_optim_agrees_with_torch(name: str) -> None:
    task = mlp_task()
    fit = request(task, TorchOptimiser(name=name, lr=0.002, epochs=10, batch=32))
    assert near(
        run_one(fit).params,
        by_torch(task, fit, name, weight_decay=0.0) if name == "AdamW" else by_torch(task, fit, name),
        1e-6,
    )


def expected_rates(name: str, length: int, warmup: int, steps: int) -> list[float]:
    """The rates of torch's own schedulers."""
    parameter = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    of_torch = torch.optim.lr_scheduler
    after = {
        "cosine": lambda: of_torch.CosineAnnealingLR(optimiser, length - warmup),
        "step": lambda: of_torch.MultiStepLR(optimiser, [(length - warmup) // 2, (length - warmup) * 3 // 4]),
        "linear": lambda: of_torch.LinearLR(optimiser, 1.0, 0.0, length - warmup),
        "constant": lambda: of_torch.ConstantLR(optimiser, 1.0, 1),
    }[name]()
    rates = [(k + 1) / (warmup + 1) for k in range(warmup)]
    while len(rates) < steps:
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        after.step()
    return rates


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules_are_those_of_torch(name: str, warmup: int) -> None:
    plan = SGD(lr=1.0, schedule=name, schedule_length=20 + warmup, warmup=warmup)  # type: ignore[arg-type]
    rates = [plan.at(r).lr for r in range(1, 21 + warmup)]
    assert rates == pytest.approx(expected_rates(name, 20 + warmup, warmup, 20 + warmup), abs=1e-9)


def test_a_schedule_by_steps_changes_the_rate_inside_a_round() -> None:
    task = mlp_task()
    plan = SGD(lr=0.1, epochs=4, batch=32, schedule="cosine", schedule_by="step", schedule_length=20)
    fit = request(task, plan)
    rates = [0.1 * 0.5 * (1 + math.cos(math.pi * k / 20)) for k in range(20)]
    theirs = by_torch(task, fit, "SGD", rates)
    assert near(run_one(fit).params, theirs, 1e-6)
    assert near(run([fit, request(task, plan, seed=9)])[0].params, theirs, 1e-6)
    assert plan.at(5) is plan
    assert plan.travel(160) == pytest.approx(sum(rates))
    with_momentum = SGD(
        lr=0.1, momentum=0.5, epochs=1, batch=80, schedule="linear", schedule_by="step", schedule_length=2
    )
    assert with_momentum.travel(160) == pytest.approx(0.1 * 1 + 0.05 * 1.5)


def test_accumulated_batches_are_one_larger_batch() -> None:
    task = mlp_task()
    whole = run_one(request(task, SGD(lr=0.1, batch=0))).params
    fit = request(task, SGD(lr=0.1, batch=40, accumulate=4))
    parts = run_one(fit)
    assert near(parts.params, whole, 1e-6)
    assert parts.steps == 1
    assert fit.plan.steps(160) == 1
    two = run_one(request(task, SGD(lr=0.1, batch=40, accumulate=3)))  # three batches, then the one that is left
    assert two.steps == 2
    assert same(run([fit, fit])[0].params, parts.params)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SGD(schedule="cosine"), "schedule_length"),
        (lambda: SGD(schedule="cosine", schedule_length=5, warmup=5), "warmup"),
        (lambda: TorchOptimiser(name="RMSpop"), "RMSprop"),
        (lambda: TorchOptimiser(name="LBFGS"), "LBFGS"),
        (lambda: TorchOptimiser(name="RMSprop", options="alfa=1"), "alpha"),
        (lambda: TorchOptimiser(name="RMSprop", options="alpha=x"), "NUMBER"),
        (lambda: TorchOptimiser(name="Rprop", weight_decay=0.1), "weight decay"),
        (lambda: Experiment(optimiser="adamm").checked(), "adam"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(make: Any, says: str) -> None:
    with pytest.raises(Mistake, match=says):
        make()


def test_an_experiment_names_any_of_them() -> None:
    assert plan_class("adamw") is AdamW
    experiment = Experiment(optimiser="RMSprop", local={"lr": 0.01, "options": "alpha=0.9"}).checked()
    assert experiment.local["name"] == "RMSprop"
    assert Experiment.of({"optimiser": "RMSprop", "local": experiment.local}).local == experiment.local
    cosine = Experiment(rounds=7, local={"schedule": "cosine"}).checked()
    assert cosine.local["schedule_length"] == 7
    assert Experiment().checked().local["schedule_length"] == 0
