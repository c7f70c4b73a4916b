"""Measure the label skew of a federation from the label counts its nodes send. No label leaves a node.

On request, the counts carry noise for differential privacy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kilter.blocks.label_summary import count
from kilter.core import Data, Federation, Method, Node, Params, Replies, Rows, step
from kilter.data.skew import Skew, learnable, of_counts
from kilter.data.split import Split
from kilter.errors import Mistake
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from kilter.train import SGD


@dataclass(frozen=True, kw_only=True)
class Census(Method):
    """Asks every node once for its label counts. There is no model.

    With `epsilon`, counts leave the node only with Laplace noise of scale 1/epsilon. That is epsilon-differentially private for
    one row added or removed, which changes one count by 1. Rounding and clipping at 0 happen after the noise.
    Keeps: nothing.  Sends: how many rows it has of each class.
    """

    classes: int  # of the common label set
    epsilon: float = 0.0  # of differential privacy; 0: exact counts

    def setup(self, fed: Federation) -> Replies:
        replies: Replies = fed.map(self.tell)
        return replies

    def round(self, fed: Federation, state: Replies) -> Replies:
        return state

    def model(self, state: Replies) -> Params | None:
        return None

    @step
    def tell(self, node: Node, _: None) -> Tensor:
        counts = count(node.data.train["y"], self.classes)
        return with_noise(counts, self.epsilon) if self.epsilon else counts


def with_noise(counts: Tensor, epsilon: float, chance: random.Random | None = None) -> Tensor:
    """Counts plus Laplace noise of scale 1/epsilon, rounded, at least 0.

    The noise comes from the operating system, not from the run's seed: whoever knows the seed could subtract it.
    """
    chance = chance or random.SystemRandom()
    # the difference of two exponential variables has a Laplace distribution
    noise = [chance.expovariate(epsilon) - chance.expovariate(epsilon) for _ in range(len(counts))]
    return (counts + torch.tensor(noise, dtype=torch.float64)).round().clamp_(min=0).long()


def census(split: Split, epsilon: float = 0.0) -> tuple[Skew, NDArray[np.int64], int]:
    """The label skew, from the counts each client sends of its train and valid rows; those counts; the bytes they took."""
    if not (isfinite(epsilon) and epsilon >= 0):
        raise Mistake(f"epsilon must be positive, or 0 for no noise, not {epsilon}.")
    nothing = Rows({}, torch.empty(0, dtype=torch.int64))
    clients = {
        name: Data(Rows({"y": split.dataset.labels}, rows), nothing, nothing) for name, rows in learnable(split).items()
    }
    asked = Census(task=Task(nn.Identity()), local=SGD(), classes=len(split.dataset.label_names), epsilon=epsilon)
    with Simulation(clients) as fed:
        fed.bind(asked)
        replies = asked.setup(fed)
        spent = fed.ledger.close().bytes_up
    table = np.stack([counts.numpy() for counts in replies.values()])
    if not table.sum():
        raise Mistake(f"Noise of epsilon {epsilon:g} removed every count: choose a larger epsilon.")
    return of_counts(list(replies), table), table, spent
