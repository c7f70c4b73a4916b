"""Small federations, networks and methods that the tests share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kilter.blocks.density.made import MADE
from kilter.core import Data, Method, Rows
from kilter.methods import methods
from kilter.models import build
from kilter.records.codec import to_tree
from kilter.records.types import Round, Summary
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from kilter.train import SGD

SHAPE = (1, 8, 8)


@cache
def digits() -> Rows:
    """scikit-learn's digits as (N, 1, 8, 8) floats in 0..1."""
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).reshape(-1, *SHAPE) / 16
    return Rows.of(x=x, y=torch.tensor(y))


def skewed(clients: int = 4, seed: int = 0, rows: int = 400) -> dict[str, Data]:
    """Clients of digits whose labels (Dirichlet 0.3 by class) and amounts differ; rows of the tables are shared."""
    rng = np.random.default_rng(seed)
    table = digits()
    chosen = rng.permutation(1300)[:rows]  # the rest is the common test set
    y = table["y"].numpy()[chosen]
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in range(10):
        mine = chosen[y == label]
        cuts = (np.cumsum(rng.dirichlet([0.3] * clients)) * len(mine)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(mine, cuts), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        part.extend(rng.choice(chosen, 12).tolist())  # nobody is left with nothing
    return {f"c{k}": three_ways(rng.permutation(part)) for k, part in enumerate(parts)}


def three_ways(index: np.ndarray) -> Data:
    """train 70 %, valid 15 %, test 15 % of these rows of digits."""
    n = len(index)
    cut = n * 70 // 100, n * 85 // 100
    tables = digits().tables
    return Data(*(Rows(tables, torch.tensor(i, dtype=torch.int64)) for i in np.split(index, cut)))


def bench(rows: int = 300) -> Rows:
    return digits().take(torch.arange(1300, 1300 + rows))


def public() -> Rows:
    return digits().take(torch.arange(1700, 1790))


def federation(clients: dict[str, Data] | int = 4, **options: Any) -> Simulation:
    made = skewed(clients) if isinstance(clients, int) else clients
    return Simulation(made, **{"bench": bench(), "public": public()} | options)


def mlp_task(width: int = 16, augment: str = "") -> Task:
    return Task(lambda: build(f"mlp:{width}", SHAPE, 10), augment=augment)


class Normed(nn.Module):
    """Body and head, with BatchNorm and dropout in the body."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(64, 16)
        self.body = nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def normed_task() -> Task:
    return Task(Normed)


def method(name: str, task: Task | None = None, cohort: float = 1.0, **settings: Any) -> Method:
    """A method with a local plan fit for these small federations; keywords of the plan come as `local=SGD(...)`."""
    local = settings.pop("local", SGD(lr=0.1, batch=16))
    return methods()[name](task=task or mlp_task(), local=local, cohort=cohort, **settings)


def topologies(name: str) -> tuple[str, ...]:
    """A star and peers, as far as a method can run under them."""
    needs = methods()[name].needs
    if "everyone" in needs:
        return ("full",)
    return ("star",) if "aggregator" in needs else ("star", "ring")


def same(a: Any, b: Any) -> bool:
    """Bit for bit the same tree (NaN equals itself)."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool(torch.equal(bits(a), bits(b)))
        )
    if isinstance(a, dict) or isinstance(b, dict):
        return isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) or isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def near(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
    """The same names, and numbers this close."""
    return a.keys() == b.keys() and all(
        bool(torch.allclose(a[k].double(), b[k].double(), rtol=tolerance, atol=tolerance)) for k in a
    )


class Vector(nn.Module):
    """A bare weight vector: the network of the toy problems."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def linear_task(start: list[float]) -> Task:
    """Loss <w, y>: the gradient is the mean of the rows' y, whatever w is."""
    return Task(Vector(start), loss=lambda out, y: (out * y).sum(1), metrics={})


def table(**columns: Tensor) -> Data:
    """A node whose train, valid and test are all of these rows."""
    rows = Rows.of(**columns)
    return Data(rows, rows, rows)


def constant(gradients: list[list[float]]) -> Data:
    """A node of `linear_task` with one row for each of these gradients."""
    y = torch.tensor(gradients)
    return table(x=torch.zeros(len(y), 1), y=y)


class Quadratic(Vector):
    """Outputs w, to be compared with a row's (curvature, centre)."""


def quadratic_task(start: list[float]) -> Task:
    """Loss sum_j a_j (w_j - b_j)^2 / 2 of rows y = (a, b)."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        a, b = y.chunk(2, dim=1)
        return (a * (out - b) ** 2).sum(1) / 2

    return Task(Quadratic(start), loss=loss, metrics={})


def quadratic(a: list[float], b: list[float]) -> Data:
    return table(x=torch.zeros(1, 1), y=torch.tensor([[*a, *b]]))


def known_made() -> MADE:
    """The model of KAT D3b."""
    made = MADE(3, degrees=(1, 2))
    values = {
        "sees.weight": [[0.5, -1, 0.3], [1.5, 0.7, -0.2]],
        "sees.bias": [0.1, -0.3],
        "says.weight": [[1, 1], [2, -1], [-0.5, 1.2]],
        "says.bias": [0.2, -0.4, 0.6],
    }
    made.load_state_dict({k: torch.tensor(v) for k, v in values.items()})
    return made


def every(bits: int) -> torch.Tensor:
    """All binary rows, 0...0 to 1...1."""
    return torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * bits).reshape(-1, bits)


def timeless(record: Round | Summary) -> dict[str, Any]:
    """A record as plain values, without what depends on the clock or the number of processes."""
    return {k: v for k, v in to_tree(record).items() if k not in ("seconds", "fit_seconds", "workers")}
