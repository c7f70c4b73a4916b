"""What is measured of a model's outputs. Macro averages run over the classes that occur, in truth or in prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Metric = Callable[[Tensor, Tensor], float]


def confusion(outputs: Tensor, y: Tensor) -> Tensor:
    """(C, C) counts: row = truth, column = prediction."""
    classes = outputs.shape[1]
    return torch.bincount(y * classes + outputs.argmax(1), minlength=classes * classes).reshape(classes, classes)


def per_class(counts: Tensor) -> dict[str, list[float]]:
    """Accuracy, precision, sensitivity, specificity and F1 of each class against the rest; 0 where undefined."""
    c = counts.double()
    hit = c.diagonal()
    truth, said, n = c.sum(1), c.sum(0), c.sum()

    def ratio(a: Tensor, b: Tensor) -> list[float]:
        return torch.where(b > 0, a / b.clamp(min=1), torch.zeros_like(a)).tolist()

    return {
        "accuracy": ratio(n - truth - said + 2 * hit, n.expand_as(hit)),
        "precision": ratio(hit, said),
        "recall": ratio(hit, truth),
        "specificity": ratio(n - truth - said + hit, n - truth),
        "f1": ratio(2 * hit, truth + said),
    }


def recalls(counts: Tensor) -> list[float | None]:
    """The share of each class's rows that is recognised, from `confusion`; None for a class without rows."""
    truth = counts.sum(1)
    each = (counts.diagonal().double() / truth.clamp(min=1)).tolist()
    return [r if n else None for r, n in zip(each, truth.tolist(), strict=True)]


def local_accuracy(recall: Sequence[float | None], counts: Sequence[float]) -> float | None:
    """sum_c pi_c acc_c: a common test set seen with one's own shares pi of the classes (of those that it has).

    SLFed's local-non-IID accuracy, without the noise of drawing a test set for each client.

    >>> round(local_accuracy([0.9, 0.5, 0.7], [2000, 5, 1000]), 6)
    0.832779
    """
    both = [(r, n) for r, n in zip(recall, counts, strict=True) if r is not None]
    total = sum(n for _, n in both)
    return sum(r * n for r, n in both) / total if total else None


def entropy(p: Tensor) -> Tensor:
    """Predictive entropy of each row of probabilities, as a share of the most there can be, ln C: 0 sure, 1 no idea.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0., 1.])
    """
    return (torch.special.xlogy(p, p).sum(1) / math.log(max(p.shape[1], 2))).abs().clamp(max=1)


def calibration_error(p: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean over rows of |accuracy - confidence| of the row's bin of confidence (Guo et al. 2017).

    >>> calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))  # right half the time
    0.25
    """
    confidence, said = p.double().max(1)
    gap = (said == y).double() - confidence
    bin_ = (confidence * bins).ceil().long().clamp(1, bins) - 1
    return float(torch.zeros(bins).double().index_add(0, bin_, gap).abs().sum() / len(y))


def classification(outputs: Tensor, y: Tensor) -> dict[str, float]:
    """Every metric of a classifier; recall is the macro sensitivity."""
    counts = confusion(outputs, y)
    each = per_class(counts)
    occurs = ((counts.sum(0) + counts.sum(1)) > 0).nonzero().flatten().tolist()
    present = (counts.sum(1) > 0).nonzero().flatten().tolist()
    macro = {name: sum(each[name][c] for c in occurs) / len(occurs) for name in each if name != "accuracy"}
    p = torch.softmax(outputs.double(), 1)
    top = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    return {
        "accuracy": float(counts.diagonal().sum().double() / counts.sum()),
        "balanced_accuracy": sum(each["recall"][c] for c in present) / len(present),
        **macro,
        "top5": float((top == y[:, None]).any(1).double().mean()),
        "calibration_error": calibration_error(p, y),
        "entropy": float(entropy(p).mean()),
        "loss": float(cross_entropy(outputs.double(), y)),
    }


def measure(outputs: Tensor, y: Tensor, metrics: Mapping[str, Metric] | None, loss: Metric) -> dict[str, float]:
    """A task's metrics on these outputs: the classifier's, or the user's own with the loss."""
    if metrics is None:
        return classification(outputs, y)
    return {"loss": loss(outputs, y)} | {name: float(metric(outputs, y)) for name, metric in metrics.items()}
