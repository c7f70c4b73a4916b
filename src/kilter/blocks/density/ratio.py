"""Density ratios a(x) = p(x) / q(x) as row weights: weighted rows of a client (drawn from q) represent all clients (p).

The ratio comes from a classifier h that separates rows of q (class 0) from rows of p (class 1), or from two density models.
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

ClassifierRule = Literal["odds", "prob", "minmax2", "tri"]
UNITS = 100  # hidden units of the classifier
EPOCHS = 40  # most epochs of the classifier
PATIENCE = 3  # epochs without a better validation loss
CLASSIFIER_PLAN = SGD(lr=0.01)


# From P = h(class 1 | x), or from ln p(x) - ln q(x), to weights ----------------------------------------------------


def weights_by_classifier(
    probability: Tensor, rule: ClassifierRule = "odds", delta: float = 0.01, zeros: int = 1, ones: int = 1
) -> Tensor:
    """Weights from the classifier's P(class 1), clipped to delta..1-delta. It was trained on `zeros` and `ones` rows of each class.

    odds     P / (1 - P) x zeros / ones: the ratio itself, if P is exact (FedDisk Eq. 15-16)
    prob     P (FedDisk Alg. 1, line 20)
    minmax2  odds rescaled to 0..2 (the authors' digits script)
    tri      1 - 2 |P - 1/2| (the authors' X-ray script)

    >>> weights_by_classifier(torch.tensor([0.2, 0.5, 0.8])).round(decimals=4).tolist()
    [0.25, 1.0, 4.0]
    """
    p = probability.double().clamp(delta, 1 - delta)
    odds = p / (1 - p) * (zeros / ones)
    if rule == "prob":
        return p
    if rule == "tri":
        return 1 - 2 * (p - 0.5).abs()
    if rule == "minmax2":
        low, high = odds.aminmax()
        return 2 * (odds - low) / (high - low) if high > low else torch.ones_like(odds)
    return odds


def weights_by_density(log_ratio: Tensor, tau: float = 1.0, centre: bool = True) -> Tensor:
    """(p/q)^tau from ln p - ln q of each row, divided by the median over rows; tau = 1 without `centre` is the plain ratio."""
    tempered = tau * log_ratio.double()
    return torch.exp((tempered - tempered.median() if centre else tempered).clamp(-50, 50))


def normalised(a: Tensor, low: float = 0.0, high: float = math.inf) -> Tensor:
    """a clipped to low..high and divided by its mean, because E_q[p/q] = 1."""
    a = a.double().clamp(low, high)
    mean = a.mean()
    return (a / mean).float() if mean > 0 else torch.ones_like(a, dtype=torch.float32)


def effective_size(a: Tensor) -> float:
    """ESS = (sum a)^2 / sum a^2: the number of equally weighted rows that would be worth as much."""
    a = a.double()
    return float(a.sum().square() / a.square().sum())


# The classifier, and early stopping --------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def loss_of(task: Task) -> Loss:
    """A task's loss with the signature of a fit. One function for each task, so that the fits of many nodes can be stacked."""
    return lambda w, batch, _: task.loss(w, batch)


def fit_until_stale(
    node: Node, task: Task, w: Params, plan: Plan, rows: Rows, valid: Rows, fits: int, patience: int
) -> Generator[Fit, Params, Params]:
    """Repeat a fit until the validation loss has not improved `patience` times in a row. Returns the best model on validation.

    A node without validation rows uses its training rows.
    """
    check = valid if len(valid) else rows
    best, least, stale = w, task.mean_loss(w, check), 0
    for _ in range(fits):
        w = yield node.fit(loss_of(task), w, plan, rows=rows)
        loss = task.mean_loss(w, check)
        if loss < least:
            best, least, stale = w, loss, 0
        elif (stale := stale + 1) >= patience:
            break
    return best


@lru_cache(maxsize=8)
def classifier_task(inputs: int) -> Task:
    """FedDisk's classifier h: 100 ReLU units, two classes."""
    return Task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, UNITS), nn.ReLU(), nn.Linear(UNITS, 2)), metrics={}
    )


def labelled(zeros: Tensor, ones: Tensor) -> Rows:
    """Rows labelled 0, followed by rows labelled 1."""
    return Rows.of(
        x=torch.cat([zeros, ones]), y=torch.arange(2).repeat_interleave(torch.tensor([len(zeros), len(ones)]))
    )


def classify(node: Node, rows: Rows, valid: Rows, x: Tensor) -> Generator[Fit, Params, Tensor]:
    """P(class 1) of x by a classifier trained on these rows, with early stopping on the validation rows."""
    task = classifier_task(rows["x"].flatten(1).shape[1])
    h = yield from fit_until_stale(node, task, task.init(node.seed), CLASSIFIER_PLAN, rows, valid, EPOCHS, PATIENCE)
    return task.predict(h, x).softmax(1)[:, 1]
