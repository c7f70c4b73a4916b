"""The kinds of tasks that `--task` names: the loss, the metrics, the size of the outputs and what a prediction is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from kilter.errors import Mistake, unknown
from kilter.metrics import Metric
from kilter.tasks import losses, scores
from kilter.tasks.losses import LossRule, RowLoss, TargetFacts

CLASSIFIER_METRICS: Mapping[str, Metric] = {"auroc": scores.auroc, "auprc": scores.auprc, "brier": scores.brier}
BY_CLASS = "by_class"  # in --metrics of a classifier: precision, recall, specificity and F1 of each class


class TaskArguments(TypedDict):
    """What a kind decides about a `Task`."""

    loss: RowLoss
    metrics: Mapping[str, Metric] | None
    more: Mapping[str, Metric]
    main: str
    units: tuple[float, float] | None
    kind: str


@dataclass(frozen=True)
class TaskKind:
    """One kind of task."""

    name: str
    about: str
    losses: Mapping[str, LossRule]  # the first is the default
    main: str  # the metric that chooses the best round and that tables show
    metrics: Mapping[str, Metric] | None  # the default ones; None: those of a classifier
    more: Mapping[str, Metric] = field(default_factory=dict)  # what --metrics may add
    always: tuple[str, ...] = ()  # those of `more` that are reported anyway
    outputs: Callable[[TargetFacts, str], int] = lambda target, _: target.classes
    in_units: bool = False  # outputs are in the units of the target

    @property
    def classifies(self) -> bool:
        """Whether a row has one class: methods and evaluation may count labels."""
        return self.metrics is None

    def loss(self, spec: str, target: TargetFacts) -> RowLoss:
        """The loss of this name; the default for an empty one."""
        rule, number = losses.parse(spec, self.losses)
        return rule.make(target, number)

    def arguments(self, loss: str, metrics: str, target: TargetFacts) -> TaskArguments:
        """The arguments of a `Task` of this kind."""
        return {
            "loss": self.loss(loss, target),
            "metrics": self.metrics,
            "more": self.extra(metrics, target),
            "main": self.main,
            "units": (target.mean, target.std) if self.in_units else None,
            "kind": self.name,
        }

    def check(self, loss: str, metrics: str) -> None:
        """Refuse unknown names."""
        losses.parse(loss, self.losses)
        self.extra(metrics)

    def extra(self, names: str, target: TargetFacts | None = None) -> dict[str, Metric]:
        """The metrics that --metrics adds to the default ones; those of each class only if the target is known."""
        wanted = [*self.always, *(name.strip() for name in names.split(",") if name.strip())]
        for name in wanted:
            if (
                name not in self.more
                and name not in (self.metrics or {})
                and not (name == BY_CLASS and self.classifies)
            ):
                if not self.more:
                    raise Mistake(f"The task {self.name} has no further metrics: leave out --metrics.")
                raise unknown(f"metric of the task {self.name}", name, [*self.more, *[BY_CLASS] * self.classifies])
        chosen = {name: self.more[name] for name in wanted if name in self.more}
        if BY_CLASS in wanted and target is not None:
            chosen |= scores.of_classes(target.names or tuple(map(str, range(target.classes))))
        return chosen


def _survival_outputs(_: TargetFacts, loss: str) -> int:
    name, _colon, number = loss.partition(":")
    return int(float(number or losses.SURVIVAL[name].default)) if name == "discrete-time" else 1


KINDS: Mapping[str, TaskKind] = {
    kind.name: kind
    for kind in (
        TaskKind(
            "multi-class", "one of several classes", losses.CLASSES, "accuracy", None, CLASSIFIER_METRICS,
        ),
        TaskKind(
            "binary", "one of two classes, with AUROC and AUPRC", losses.CLASSES, "accuracy", None, CLASSIFIER_METRICS,
            ("auroc", "auprc"),
        ),
        TaskKind(
            "multi-label",
            "any number of labels; --label names their columns of 0 and 1",
            losses.LABELS,
            "auroc",
            {
                "auroc": scores.label_auroc,
                "auprc": scores.label_auprc,
                "f1": scores.label_f1,
                "label_accuracy": scores.label_accuracy,
            },
            {"exact_match": scores.exact_match},
        ),
        TaskKind(
            "regression",
            "a number",
            losses.NUMBERS,
            "mae",
            {"mae": scores.mae, "rmse": scores.rmse, "r2": scores.r2},
            {"median_error": scores.median_error},
            outputs=lambda _t, _l: 1,
            in_units=True,
        ),
        TaskKind(
            "survival",
            "a time until an event, with censoring; --label names the time and --event the event (1) or censoring (0)",
            losses.SURVIVAL,
            "c_index",
            {"c_index": scores.c_index},
            outputs=_survival_outputs,
        ),
        TaskKind(
            "segmentation",
            "a class for each pixel; class 0 is the background",
            losses.PIXELS,
            "dice",
            {"dice": scores.dice, "iou": scores.iou, "pixel_accuracy": scores.pixel_accuracy},
        ),
        TaskKind("text", "the class of a text", losses.CLASSES, "accuracy", None, CLASSIFIER_METRICS),
        TaskKind(
            "next-token",
            "the next token of a text",
            losses.TOKENS,
            "perplexity",
            {"perplexity": scores.perplexity, "token_accuracy": scores.token_accuracy},
        ),
    )
}  # fmt: skip
CLASSIFICATION = frozenset({"multi-class", "binary", "text"})


def kind_of(name: str) -> TaskKind:
    """The kind of this name."""
    if name not in KINDS:
        raise unknown("task", name, KINDS)
    return KINDS[name]


def choose_kind(wanted: str, hint: str, classes: int = 2) -> TaskKind:
    """The kind of task that was asked for (`auto`: none in particular), given what the data is for and its classes."""
    name = wanted if wanted != "auto" else hint or "multi-class"
    kind = kind_of(name)
    if hint and hint not in CLASSIFICATION and name != hint:
        raise Mistake(f"The data is for the task {hint}, and the experiment's task is {name}: use --task {hint}.")
    if name == "binary" and classes != 2:
        raise Mistake(f"The task binary has two classes, and the data has {classes}: leave out --task.")
    if name not in CLASSIFICATION and name != hint:
        raise Mistake(
            f"The task is {name}, and the data has labels for '{hint or 'multi-class'}': a site gives --task, too."
        )
    return kind


def prediction(kind: str, outputs: Tensor) -> Tensor:
    """What the outputs say about each row: a class number, labels of 0 and 1, a number, a risk, or classes of pixels."""
    if kind == "regression":
        return outputs[:, 0]
    if kind == "survival":
        return scores.risk(outputs)
    if kind == "multi-label":
        return (outputs > 0).long()
    return outputs.argmax(2) if kind == "next-token" else outputs.argmax(1)


def probabilities(kind: str, outputs: Tensor) -> Tensor | None:
    """The probability of each class or label; None for tasks without."""
    if kind == "multi-label":
        return torch.sigmoid(outputs)
    return torch.softmax(outputs, 1) if kind in CLASSIFICATION else None
