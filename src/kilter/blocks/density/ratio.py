"""Density ratios a(x) = p(x) / q(x) as row weights: weighted rows of a client (drawn from q) represent all clients (p).

The ratio comes from a classifier h that separates rows of q (class 0) from rows of p (class 1), or from two density models.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from kilter.core import Fit, Loss, Node, Params, Rows
from kilter.tasks import Task
from kilter.train import SGD, Plan

ClassifierRule = Literal["odds", "prob", "minmax2", "tri"]


@dataclass(frozen=True)
class Judge:
    """The settings of the classifier h; the defaults are FedDisk's, with at most 40 epochs."""

    units: int = 100  # hidden units
    lr: float = 0.01
    epochs: int = 40  # most epochs
    patience: int = 3  # epochs without a better validation loss


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
    """a clipped to low..high and divided by its mean, because E_q[p/q] = 1. NaN if the mean is not positive and finite."""
    a = a.double().clamp(low, high)
    mean = a.mean()
    return (a / mean).float() if 0 < mean < math.inf else torch.full_like(a, math.nan, dtype=torch.float32)


def clipped_share(a: Tensor, low: float, high: float) -> float:
    """The share of the ratios outside low..high."""
    return float(((a < low) | (a > high)).double().mean())


def auc(zeros: Tensor, ones: Tensor) -> float:
    """How well scores separate two classes: the probability that one of class 1 has the higher score; 1/2 is chance.

    >>> auc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    from scipy.stats import rankdata

    n, m = len(zeros), len(ones)
    if not n or not m:
        return 0.5
    ranks = rankdata(torch.cat([zeros, ones]).double().numpy())
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


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
def classifier_task(inputs: int, units: int = 100) -> Task:
    """FedDisk's classifier h: 100 ReLU units, two classes."""
    return Task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, 2)), metrics={}
    )


def labelled(zeros: Tensor, ones: Tensor) -> Rows:
    """Rows labelled 0, followed by rows labelled 1."""
    return Rows.of(
        x=torch.cat([zeros, ones]), y=torch.arange(2).repeat_interleave(torch.tensor([len(zeros), len(ones)]))
    )


def classify(
    node: Node, rows: Rows, valid: Rows, x: Tensor, judge: Judge | None = None
) -> Generator[Fit, Params, Tensor]:
    """P(class 1) of x by a classifier trained on these rows, with early stopping on the validation rows.

    Records the AUC on the validation rows (on the training rows if there are none). A notice says if the classifier learnt nothing.
    """
    judge = judge or Judge()
    task = classifier_task(rows["x"].flatten(1).shape[1], judge.units)
    plan, first = SGD(lr=judge.lr), task.init(node.seed)
    h = yield from fit_until_stale(node, task, first, plan, rows, valid, judge.epochs, judge.patience)
    if h is first:
        node.notice("the classifier of rows did not improve on validation: weights come from an untrained one")
    check = valid if len(valid) else rows
    scores = task.predict(h, check["x"]).softmax(1)[:, 1]
    node.record("AUC of the classifier", auc(scores[check["y"] == 0], scores[check["y"] == 1]))
    return task.predict(h, x).softmax(1)[:, 1]
