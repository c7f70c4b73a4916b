"""An ensemble of models, {mean} U clients U samples. Samples are stored as a recipe: only one exists in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor

from kilter.blocks.posterior import gaussian, inputs, mixture, refresh_batchnorm
from kilter.core import Params, Rows
from kilter.metrics import entropy
from kilter.params import buffers
from kilter.seeds import generator
from kilter.tasks import Task


class Ensemble(TypedDict):
    """A plain tree that can be sent and checkpointed. Samples are Gaussian (`seeds`) or mixtures of clients (`shares`)."""

    mean: Params
    clients: list[Params]
    centre: Params  # of Gaussian samples; empty: the mean
    deviation: Params  # of Gaussian samples
    seeds: list[int]  # one for each Gaussian sample
    shares: list[list[float]]  # for each mixture, one share for each client
    statistics: list[Params]  # BatchNorm's, one for each sample


def ensemble(mean: Params, clients: list[Params]) -> Ensemble:
    """An ensemble of the mean and the clients, without samples."""
    return Ensemble(mean=mean, clients=clients, centre={}, deviation={}, seeds=[], shares=[], statistics=[])


def samples(e: Ensemble) -> Iterator[Params]:
    """Compute the samples, one at a time, with their BatchNorm statistics if `with_statistics` has added them."""
    recipes: list[int | list[float]] = [*e["seeds"], *e["shares"]]
    for recipe, statistics in zip(recipes, e["statistics"] or [{}] * len(recipes), strict=True):
        if isinstance(recipe, int):
            yield gaussian(e["mean"] | e["centre"], e["deviation"], generator(recipe)) | statistics
        else:
            yield mixture(e["clients"], recipe) | statistics


def with_statistics(task: Task, e: Ensemble, rows: Rows) -> Ensemble:
    """The ensemble with the BatchNorm statistics of its samples, computed on these rows."""
    return {**e, "statistics": [buffers(refresh_batchnorm(task, w, rows)) for w in samples(e)]}


def members(e: Ensemble) -> Iterator[Params]:
    """{mean} U clients U samples, one at a time."""
    yield e["mean"]
    yield from e["clients"]
    yield from samples(e)


def size(e: Ensemble) -> int:
    """The number of members."""
    return 1 + len(e["clients"]) + len(e["seeds"]) + len(e["shares"])


@torch.no_grad()
def probabilities(task: Task, e: Ensemble, rows: Rows, classes: bool = True) -> Tensor:
    """p(y|x), (rows, classes): the mean over members of softmax(f(x)), not the softmax of the mean logits.

    Without `classes` (regression), the mean over members of f(x).
    """
    total: Tensor | None = None
    for w in members(e):
        outputs = [task.outputs(w, x) for x in inputs(rows)]
        p = torch.cat([torch.softmax(o, 1) if classes else o for o in outputs])
        total = p if total is None else total.add_(p)
    assert total is not None
    return total / size(e)


def predict(task: Task, e: Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities of these inputs, and the uncertainty of each: its predictive entropy divided by ln C, in 0..1."""
    p = probabilities(task, e, Rows.of(x=x))
    return p, entropy(p)
