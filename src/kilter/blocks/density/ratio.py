"""Sample weights a(x) = p(x) / q(x) that make a client's own rows, drawn from q, stand for everyone's, drawn from p.

By a judge h that tells rows of q (class 0) from rows of p (class 1), or by the densities themselves. Rules are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from kilter.core import Fit, Loss, Node, Params, Rows
from kilter.tasks import Task
from kilter.train import SGD, Plan

Judged = Literal["odds", "prob", "minmax2", "tri"]
UNITS, EPOCHS, PATIENCE = (
    100,
    40,
    3,
)  # of the judge: hidden units, epochs at most, epochs without a better validation loss
JUDGE = SGD(lr=0.01)


# From P = h(class 1 | x), or from ln p(x) - ln q(x), to weights ----------------------------------------------------


def by_judge(chance: Tensor, rule: Judged = "odds", delta: float = 0.01, zeros: int = 1, ones: int = 1) -> Tensor:
    """Weights from the judge's P(class 1), kept within delta..1-delta; `zeros` and `ones` rows of each class taught it.

    odds     P / (1 - P) x zeros / ones: the ratio itself, if P is right (FedDisk Eq. 15-16)
    prob     P (FedDisk Alg. 1, line 20)
    minmax2  odds stretched to 0..2 (the authors' digits script)
    tri      1 - 2 |P - 1/2| (their X-ray script)

    >>> by_judge(torch.tensor([0.2, 0.5, 0.8])).round(decimals=4).tolist()
    [0.25, 1.0, 4.0]
    """
    p = chance.double().clamp(delta, 1 - delta)
    odds = p / (1 - p) * (zeros / ones)
    if rule == "prob":
        return p
    if rule == "tri":
        return 1 - 2 * (p - 0.5).abs()
    if rule == "minmax2":
        low, high = odds.aminmax()
        return 2 * (odds - low) / (high - low) if high > low else torch.ones_like(odds)
    return odds


def by_density(log_ratio: Tensor, tau: float = 1.0, centre: bool = True) -> Tensor:
    """(p/q)^tau from ln p - ln q of each row, divided by its median over the rows; tau = 1, not centred, is the ratio."""
    tempered = tau * log_ratio.double()
    return torch.exp((tempered - tempered.median() if centre else tempered).clamp(-50, 50))


def mean_one(a: Tensor, low: float = 0.0, high: float = math.inf) -> Tensor:
    """a within low..high, then divided by its mean: E_q[p/q] = 1."""
    a = a.double().clamp(low, high)
    mean = a.mean()
    return (a / mean).float() if mean > 0 else torch.ones_like(a, dtype=torch.float32)


def effective_size(a: Tensor) -> float:
    """ESS = (sum a)^2 / sum a^2: how many equally weighted rows are as good."""
    a = a.double()
    return float(a.sum().square() / a.square().sum())


# The judge, and training until validation says stop -----------------------------------------------------------------


@lru_cache(maxsize=16)
def loss_of(task: Task) -> Loss:
    """A task's loss as a fit takes it; one function a task, so that the fits of many nodes can be stacked."""
    return lambda w, batch, _: task.loss(w, batch)


def settle(
    node: Node, task: Task, w: Params, plan: Plan, rows: Rows, valid: Rows, looks: int, patience: int
) -> Generator[Fit, Params, Params]:
    """Fit after fit (`plan` each), until validation loss has not improved for `patience` of them; the best on validation.

    A node without validation rows looks at its training rows.
    """
    seen = valid if len(valid) else rows
    best, least, stale = w, task.evaluate(w, seen)["loss"], 0
    for _ in range(looks):
        w = yield node.fit(loss_of(task), w, plan, rows=rows)
        loss = task.evaluate(w, seen)["loss"]
        if loss < least:
            best, least, stale = w, loss, 0
        elif (stale := stale + 1) >= patience:
            break
    return best


@lru_cache(maxsize=8)
def judge_task(inputs: int) -> Task:
    """FedDisk's h: 100 ReLU units, two classes."""
    return Task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, UNITS), nn.ReLU(), nn.Linear(UNITS, 2)), metrics={}
    )


def both(zeros: Tensor, ones: Tensor) -> Rows:
    """Rows of class 0, then of class 1."""
    return Rows.of(
        x=torch.cat([zeros, ones]), y=torch.arange(2).repeat_interleave(torch.tensor([len(zeros), len(ones)]))
    )


def judge(node: Node, rows: Rows, valid: Rows, x: Tensor) -> Generator[Fit, Params, Tensor]:
    """P(class 1) of x by a judge taught with these rows, stopped early on the validation rows."""
    task = judge_task(rows["x"].flatten(1).shape[1])
    h = yield from settle(node, task, task.init(node.seed), JUDGE, rows, valid, EPOCHS, PATIENCE)
    return task.predict(h, x).softmax(1)[:, 1]
