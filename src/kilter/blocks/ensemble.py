"""An ensemble of models, {mean} U clients U samples, kept as a recipe: no more than one sampled model exists at any time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from torch import Tensor

from kilter.blocks.posterior import gaussian, inputs, mixture, recount
from kilter.core import Params, Rows
from kilter.metrics import entropy
from kilter.params import buffers
from kilter.seeds import generator
from kilter.tasks import Task


class Ensemble(TypedDict):
    """A plain tree, so it can be sent, kept and checkpointed. Samples are Gaussian (seeds) or mixtures of clients (shares)."""

    mean: Params
    clients: list[Params]
    centre: Params  # of Gaussian samples where it is not the mean
    deviation: Params  # of Gaussian samples
    seeds: list[int]  # one a Gaussian sample
    shares: list[list[float]]  # of the clients in each mixture
    statistics: list[Params]  # BatchNorm's, one a sample


def ensemble(mean: Params, clients: list[Params]) -> Ensemble:
    """The mean and the clients, no samples yet."""
    return Ensemble(mean=mean, clients=clients, centre={}, deviation={}, seeds=[], shares=[], statistics=[])


def samples(e: Ensemble) -> Iterator[Params]:
    """Every sample, made anew, one at a time; with its BatchNorm statistics once they are known (`settle`)."""
    drawn: list[Any] = [*e["seeds"], *e["shares"]]
    for how, own in zip(drawn, e["statistics"] or [{}] * len(drawn), strict=True):
        if isinstance(how, int):
            yield gaussian(e["mean"] | e["centre"], e["deviation"], generator(how)) | own
        else:
            yield mixture(e["clients"], how) | own


def settle(task: Task, e: Ensemble, rows: Rows) -> Ensemble:
    """With the samples' BatchNorm statistics, computed on these rows."""
    return {**e, "statistics": [buffers(recount(task, w, rows)) for w in samples(e)]}


def members(e: Ensemble) -> Iterator[Params]:
    """{mean} U clients U samples, one at a time."""
    yield e["mean"]
    yield from e["clients"]
    yield from samples(e)


def size(e: Ensemble) -> int:
    """How many members."""
    return 1 + len(e["clients"]) + len(e["seeds"]) + len(e["shares"])


@torch.no_grad()
def probabilities(task: Task, e: Ensemble, rows: Rows) -> Tensor:
    """p(y|x) = the mean over members of softmax(f(x)), (rows, classes). Never the softmax of mean logits."""
    total: Tensor | None = None
    for w in members(e):
        p = torch.cat([torch.softmax(task.outputs(w, x), 1) for x in inputs(rows)])
        total = p if total is None else total.add_(p)
    assert total is not None
    return total / size(e)


def predict(task: Task, e: Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities of these inputs, and how uncertain each is: the predictive entropy in 0..1, as a share of ln C."""
    p = probabilities(task, e, Rows.of(x=x))
    return p, entropy(p)
