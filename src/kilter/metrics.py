"""Metrics of a model's outputs. Macro averages are over the classes that occur among labels or predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Metric = Callable[[Tensor, Tensor], float | None]  # None: not defined on these rows
Measured = dict[str, float | None]
Direction = Literal["higher", "lower"]  # which values of a metric are better
M = TypeVar("M", bound=Metric)
LOWER_IS_BETTER = frozenset(
    {"loss", "calibration_error", "entropy", "error", "mae", "mse", "rmse", "nll", "brier", "perplexity"}
)
CELLS = 1 << 20  # most cells of the confusion matrices that are computed together


def lower_is_better(metric: M) -> M:
    """Mark a metric of your own whose smaller values are better. Common names such as mae and mse need no mark.

    >>> @lower_is_better
    ... def distance(outputs, y): return float((outputs - y).abs().max())
    >>> direction("distance", distance), direction("accuracy"), direction("loss")
    ('lower', 'higher', 'lower')
    """
    metric.lower_is_better = True  # type: ignore[attr-defined]
    return metric


def direction(name: str, metric: Metric | None = None) -> Direction:
    """Which values of a metric are better, by its mark or its name."""
    return "lower" if getattr(metric, "lower_is_better", False) or name in LOWER_IS_BETTER else "higher"


def is_of_one_class(name: str) -> bool:
    """Whether a metric is about one class only, such as `recall:cat` (`--metrics by_class`)."""
    return ":" in name


def confusion(outputs: Tensor, y: Tensor) -> Tensor:
    """Counts (C, C): rows are labels, columns are predictions."""
    classes = outputs.shape[1]
    return torch.bincount(y * classes + outputs.argmax(1), minlength=classes * classes).reshape(classes, classes)


def per_class(counts: Tensor) -> dict[str, list[float]]:
    """Accuracy, precision, sensitivity, specificity and F1 of each class against the rest; 0 where undefined."""
    return {name: values.tolist() for name, values in _against_rest(counts).items()}


def _against_rest(counts: Tensor) -> dict[str, Tensor]:
    """The metrics of each class, (..., C), from counts (..., C, C)."""
    c = counts.double()
    hit = c.diagonal(dim1=-2, dim2=-1)
    truth, predicted, n = c.sum(-1), c.sum(-2), c.sum((-2, -1)).unsqueeze(-1)

    def ratio(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(b > 0, a / b.clamp(min=1), torch.zeros_like(a))

    return {
        "accuracy": ratio(n - truth - predicted + 2 * hit, n.expand_as(hit)),
        "precision": ratio(hit, predicted),
        "recall": ratio(hit, truth),
        "specificity": ratio(n - truth - predicted + hit, n - truth),
        "f1": ratio(2 * hit, truth + predicted),
    }


def recalls(counts: Tensor) -> list[float | None]:
    """The recall of each class, from `confusion`; None for a class without rows."""
    truth = counts.sum(1)
    each = (counts.diagonal().double() / truth.clamp(min=1)).tolist()
    return [r if n else None for r, n in zip(each, truth.tolist(), strict=True)]


def local_accuracy(recall: Sequence[float | None], counts: Sequence[float]) -> float | None:
    """sum_c pi_c acc_c: accuracy on a common test set, weighted by a client's class shares pi (over classes in the test set).

    This is SLFed's local-non-IID accuracy, without the noise of drawing a test set for each client.

    >>> round(local_accuracy([0.9, 0.5, 0.7], [2000, 5, 1000]), 6)
    0.832779
    """
    both = [(r, n) for r, n in zip(recall, counts, strict=True) if r is not None]
    total = sum(n for _, n in both)
    return sum(r * n for r, n in both) / total if total else None


def entropy(p: Tensor) -> Tensor:
    """Predictive entropy of each row of probabilities, divided by its maximum ln C: 0 is certain, 1 is uniform.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0., 1.])
    """
    return (torch.special.xlogy(p, p).sum(1) / math.log(max(p.shape[1], 2))).abs().clamp(max=1)


def calibration_error(p: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean over rows of |accuracy - confidence| of the row's bin of confidence (Guo et al. 2017).

    >>> calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))  # half of them are right
    0.25
    """
    return _calibration_errors(p, y, _Rows([len(y)]), bins)[0]


class _Rows:
    """Rows of several owners, one after another; `sizes` are their numbers of rows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.count, self._sizes = len(sizes), torch.tensor(sizes)
        self.owner = torch.repeat_interleave(torch.arange(len(sizes)), self._sizes)

    def means(self, values: Tensor) -> list[float]:
        """The mean for each owner."""
        return self.over(torch.zeros(self.count, dtype=torch.float64).index_add(0, self.owner, values.double()))

    def over(self, totals: Tensor) -> list[float]:
        """The total of each owner, divided by its number of rows."""
        means: list[float] = (totals / self._sizes).tolist()
        return means


def _calibration_errors(p: Tensor, y: Tensor, rows: _Rows, bins: int = 15) -> list[float]:
    confidence, predicted = p.double().max(1)
    gap = (predicted == y).double() - confidence
    bin_ = (confidence * bins).ceil().long().clamp(1, bins) - 1
    total = torch.zeros(rows.count * bins).double().index_add(0, rows.owner * bins + bin_, gap)
    return rows.over(total.reshape(-1, bins).abs().sum(1))


def classification(outputs: Tensor, y: Tensor) -> dict[str, float]:
    """All metrics of a classifier; recall is the macro sensitivity."""
    return classifications(outputs, y, [len(y)])[0]


def classifications(outputs: Tensor, y: Tensor, sizes: Sequence[int]) -> list[dict[str, float]]:
    """`classification` for several owners. Their rows follow one another; `sizes` are their numbers of rows."""
    classes = outputs.shape[1]
    if len(sizes) > (most := max(1, CELLS // classes**2)):
        end = sum(sizes[:most])
        rest = classifications(outputs[end:], y[end:], sizes[most:])
        return [*classifications(outputs[:end], y[:end], sizes[:most]), *rest]
    rows = _Rows(sizes)
    cells = (rows.owner * classes + y) * classes + outputs.argmax(1)
    counts = torch.bincount(cells, minlength=len(sizes) * classes**2).reshape(-1, classes, classes)
    truth, predicted, hit = counts.sum(-1), counts.sum(-2), counts.diagonal(dim1=-2, dim2=-1).sum(-1)
    each = {name: values.tolist() for name, values in _against_rest(counts).items() if name != "accuracy"}
    occurs, present = ((truth + predicted) > 0).tolist(), (truth > 0).tolist()
    p = torch.softmax(outputs.double(), 1)
    top = outputs.topk(min(5, classes), dim=1).indices
    columns = {
        "accuracy": rows.over(hit.double()),
        "balanced_accuracy": [_mean_where(*r) for r in zip(each["recall"], present, strict=True)],
        **{name: [_mean_where(*r) for r in zip(values, occurs, strict=True)] for name, values in each.items()},
        "top5": rows.means((top == y[:, None]).any(1)),
        "calibration_error": _calibration_errors(p, y, rows),
        "entropy": rows.means(entropy(p)),
        "loss": rows.means(cross_entropy(outputs.double(), y, reduction="none")),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _mean_where(values: Sequence[float], wanted: Sequence[bool]) -> float:
    chosen = [v for v, w in zip(values, wanted, strict=True) if w]
    return sum(chosen) / len(chosen)


CLASSIFICATION = (
    "accuracy",
    "balanced_accuracy",
    "precision",
    "recall",
    "specificity",
    "f1",
    "top5",
    "calibration_error",
    "entropy",
    "loss",
)  # the names of `classification`


def measure_each(
    outputs: Tensor,
    y: Tensor,
    sizes: Sequence[int],
    metrics: Mapping[str, Metric] | None,
    more: Mapping[str, Metric],
    loss: Metric,
) -> list[Measured]:
    """The metrics of a task for several owners: those of a classifier, or the user's own and the loss; and `more` of them."""
    measured: list[Measured]
    if metrics is None:
        measured = [dict(each) for each in classifications(outputs, y, sizes)]
        if not more:
            return measured
    parts = list(zip(outputs.split(list(sizes)), y.split(list(sizes)), strict=True))
    if metrics is not None:
        measured = [{"loss": loss(*part)} | {name: number(f(*part)) for name, f in metrics.items()} for part in parts]
    return [
        known | {name: number(f(*part)) for name, f in more.items()}
        for known, part in zip(measured, parts, strict=True)
    ]


def number(value: float | None) -> float | None:
    """As a plain float; None stays None."""
    return None if value is None else float(value)
