"""Losses by name. Each takes a network's outputs and the targets, and returns one loss for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    log_softmax,
    logsigmoid,
    mse_loss,
    softmax,
)

from kilter.errors import Mistake, unknown

RowLoss = Callable[[Tensor, Tensor], Tensor]
PAIRS = 1024  # Cox: up to this many rows, risk sets are found by comparing all pairs; beyond, by sorting
IGNORED = -100  # a target that counts for nothing: padding of text


@dataclass(frozen=True)
class TargetFacts:
    """What a loss knows about the targets of all sites together."""

    classes: int = 1  # of a classifier; labels of a multi-label task
    mean: float = 0.0  # of a number; of the time in survival
    std: float = 1.0
    class_weights: tuple[float, ...] = ()
    names: tuple[str, ...] = ()  # of the classes


Maker = Callable[[TargetFacts, float], RowLoss]


@dataclass(frozen=True)
class LossRule:
    """A loss that can be named, `NAME` or `NAME:NUMBER`."""

    make: Maker
    about: str
    default: float = 0.0  # of the number; 0: it takes none
    at_most: float = float("inf")


def parse(spec: str, rules: Mapping[str, LossRule]) -> tuple[LossRule, float]:
    """A loss and its number from `NAME` or `NAME:NUMBER`; the first of the rules for an empty text."""
    name, colon, text = (spec or next(iter(rules))).partition(":")
    if name not in rules:
        raise unknown("loss of this task", name, rules)
    rule = rules[name]
    if not colon:
        return rule, rule.default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not rule.default or not 0 < number <= rule.at_most:
        limit = f" and at most {rule.at_most:g}" if rule.at_most < float("inf") else ""
        takes = f"a number above 0{limit}" if rule.default else "no number"
        raise Mistake(f"The loss '{name}' takes {takes}, not '{text}'.")
    return rule, number


# Classes --------------------------------------------------------------------------------------------------------------


def row_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each row."""
    return cross_entropy(outputs, y, reduction="none")


def _smoothed(_: TargetFacts, share: float) -> RowLoss:
    return lambda outputs, y: cross_entropy(outputs, y, reduction="none", label_smoothing=share)


def _focal(_: TargetFacts, gamma: float) -> RowLoss:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        log_p = log_softmax(outputs, 1)
        mine = log_p.gather(1, y[:, None])[:, 0]
        return -((1 - mine.exp()) ** gamma) * mine

    return loss


def _weighted(target: TargetFacts, _: float) -> RowLoss:
    if len(target.class_weights) != target.classes:
        raise Mistake("The loss class-weights needs the class counts of all sites, and here they are not known.")
    weights = torch.tensor(target.class_weights)
    return lambda outputs, y: cross_entropy(outputs, y, reduction="none") * weights.to(outputs.device)[y]


def class_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """n / (C n_c): every class counts the same in all; a class without rows has weight 1.

    >>> class_weights([90, 10])
    (0.5555555555555556, 5.0)
    """
    total, classes = sum(counts), sum(n > 0 for n in counts)
    return tuple(total / (classes * n) if n else 1.0 for n in counts)


CLASSES = {
    "cross-entropy": LossRule(lambda _t, _n: row_cross_entropy, "cross-entropy"),
    "label-smoothing": LossRule(_smoothed, "cross-entropy with smoothed labels; the number is the share", 0.1, 0.999),
    "focal": LossRule(_focal, "focal loss (1-p)^gamma CE (Lin et al. 2017); the number is gamma", 2.0, 100.0),
    "class-weights": LossRule(_weighted, "cross-entropy; classes weighted by n/(C n_c), counted over all sites"),
}


# Several labels -------------------------------------------------------------------------------------------------------


def _binary(outputs: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)


def _binary_focal(_: TargetFacts, gamma: float) -> RowLoss:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        log_p = y * logsigmoid(outputs) + (1 - y) * logsigmoid(-outputs)
        return (-((1 - log_p.exp()) ** gamma) * log_p).mean(1)

    return loss


LABELS = {
    "cross-entropy": LossRule(lambda _t, _n: _binary, "binary cross-entropy, the mean over labels"),
    "focal": LossRule(_binary_focal, "focal loss (1-p)^gamma BCE; the number is gamma", 2.0, 100.0),
}


# Numbers --------------------------------------------------------------------------------------------------------------


def _squared(target: TargetFacts, _: float) -> RowLoss:
    scale = target.std
    return lambda outputs, y: mse_loss(outputs[:, 0] / scale, y / scale, reduction="none")


def _absolute(target: TargetFacts, _: float) -> RowLoss:
    scale = target.std
    return lambda outputs, y: (outputs[:, 0] - y).abs() / scale


def _huber(target: TargetFacts, delta: float) -> RowLoss:
    scale = target.std
    return lambda outputs, y: huber_loss(outputs[:, 0] / scale, y / scale, reduction="none", delta=delta)


NUMBERS = {
    "mse": LossRule(_squared, "squared error, in standard deviations of the target"),
    "mae": LossRule(_absolute, "absolute error, in standard deviations of the target"),
    "huber": LossRule(_huber, "squared error up to the number (in standard deviations), absolute beyond", 1.0),
}


# Survival: y is (time, event), event 0 means censored -------------------------------------------------------------------


def cox(outputs: Tensor, y: Tensor) -> Tensor:
    """The negative Cox partial log-likelihood of each row (Breslow's ties); 0 for censored rows. The risk set is the batch."""
    risk, time, event = outputs[:, 0], y[:, 0], y[:, 1]
    if len(risk) <= PAIRS:
        later = time[None, :] >= time[:, None]  # (i, j): j is at risk when i has its event
        at_risk = torch.where(later, risk[None, :], torch.full_like(risk, -torch.inf)[None, :]).logsumexp(1)
    else:
        order = time.argsort(descending=True)
        running = risk[order].logcumsumexp(0)
        last = torch.searchsorted(-time[order], -time, right=True) - 1  # rows with the same time are at risk too
        at_risk = running[last]
    return event * (at_risk - risk)


def cut_points(mean_time: float, intervals: int) -> Tensor:
    """The inner ends of the intervals of discrete time: quantiles of the exponential distribution with this mean.

    They depend on one pooled number only, so all sites have the same intervals.
    """
    shares = torch.arange(1, intervals, dtype=torch.float64) / intervals
    return (-mean_time * torch.log1p(-shares)).float()


def _discrete_time(target: TargetFacts, intervals: float) -> RowLoss:
    """Survival in discrete time (Gensheimer, Narasimhan 2019): each output is the log-odds of an event in its interval."""
    cuts = cut_points(target.mean, int(intervals))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        time, event = y[:, 0], y[:, 1]
        at = (time[:, None] > cuts.to(time.device)[None, :]).sum(1)  # the interval of each row
        here = one_hot_float(at, outputs.shape[1])
        before = (torch.arange(outputs.shape[1], device=time.device)[None, :] < at[:, None]).float()
        survived = before + here * (1 - event)[:, None] * 0.5  # censored inside an interval: half of it counts
        return -(survived * logsigmoid(-outputs) + here * event[:, None] * logsigmoid(outputs)).sum(1)

    return loss


def one_hot_float(index: Tensor, classes: int) -> Tensor:
    """One-hot rows as floats. It works inside `vmap`, where torch's one_hot may not."""
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).float()


SURVIVAL = {
    "cox": LossRule(lambda _t, _n: cox, "Cox partial likelihood; the risk set is the batch, so use large batches"),
    "discrete-time": LossRule(_discrete_time, "hazards of time intervals; the number is how many", 10.0, 1000.0),
}


# Pixels ---------------------------------------------------------------------------------------------------------------


def _pixel_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    log_p = log_softmax(outputs, 1)
    return -log_p.gather(1, y[:, None])[:, 0].flatten(1).mean(1)


def _soft_dice(outputs: Tensor, y: Tensor) -> Tensor:
    """1 - Dice of each row, the mean over the classes except the background (class 0)."""
    p = softmax(outputs, 1)[:, 1:].flatten(2)
    truth = one_hot_float(y, outputs.shape[1]).movedim(-1, 1)[:, 1:].flatten(2)
    dice = (2 * (p * truth).sum(2) + 1) / (p.sum(2) + truth.sum(2) + 1)
    return 1 - dice.mean(1)


PIXELS = {
    "dice-ce": LossRule(
        lambda _t, _n: lambda o, y: _pixel_cross_entropy(o, y) + _soft_dice(o, y), "cross-entropy plus 1 - Dice"
    ),
    "dice": LossRule(lambda _t, _n: _soft_dice, "1 - Dice"),
    "cross-entropy": LossRule(lambda _t, _n: _pixel_cross_entropy, "cross-entropy, the mean over pixels"),
}


# Tokens ---------------------------------------------------------------------------------------------------------------


def next_token(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each row, the mean over its tokens; padding does not count. outputs (n, time, tokens), y (n, time)."""
    counts = (y != IGNORED).float()
    known = torch.where(y == IGNORED, torch.zeros_like(y), y)
    losses = -log_softmax(outputs, 2).gather(2, known.unsqueeze(2))[:, :, 0]
    return (losses * counts).sum(1) / counts.sum(1).clamp(min=1)


TOKENS = {"cross-entropy": LossRule(lambda _t, _n: next_token, "cross-entropy, the mean over the tokens of a row")}
