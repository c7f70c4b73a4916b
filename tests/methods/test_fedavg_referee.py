"""A straightforward hand-written FedAvg in plain PyTorch, as referee: on the same split, ours is as good.

Once sharing nothing with Kilter but the rows of each client (the mean of some runs is compared), and once with the initial
weights and the order of rows given as well, so that one run on MNIST decides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kilter.core import Data, Fit, Rows
from kilter.data import load, split
from kilter.federate import federate
from kilter.methods import methods
from kilter.models import build
from kilter.runtimes.simulation import Simulation
from kilter.seeds import derive
from kilter.tasks import Task
from kilter.train import SGD, batches
from small import SHAPE, bench, skewed

Order = Callable[[int, int], Iterable[Tensor | slice]]  # (round, client) -> the rows of each step


def referee(net: nn.Module, clients: list[Rows], test: Rows, rounds: int, lr: float, order: Order) -> float:
    """FedAvg as anyone would write it in an afternoon; its accuracy on the test set."""
    total = sum(len(c) for c in clients)
    for r in range(1, rounds + 1):
        mean: dict[str, Tensor] = {}
        for k, rows in enumerate(clients):
            local = copy.deepcopy(net).train()
            optim = torch.optim.SGD(local.parameters(), lr=lr)
            x, y = rows["x"], rows["y"]
            for at in order(r, k):
                optim.zero_grad()
                nn.functional.cross_entropy(local(x[at]), y[at]).backward()
                optim.step()
            for name, value in local.state_dict().items():
                mean[name] = mean.get(name, 0) + value * (len(y) / total)
        net.load_state_dict({k: v.to(net.state_dict()[k].dtype) for k, v in mean.items()})
    net.eval()
    with torch.no_grad():
        return float((net(test["x"]).argmax(1) == test["y"]).float().mean())


def ours(task: Task, clients: dict[str, Data], test: Rows, rounds: int, plan: SGD, seed: int) -> float:
    with Simulation(clients, bench=test, seed=seed) as fed:
        actual = federate(methods()["fedavg"](task=task, local=plan), fed, rounds, evaluate_every=rounds)
        return float(actual.summary.global_accuracy)


def test_digits_with_only_the_split_in_common() -> None:
    clients, test, plan = skewed(5, rows=1200), bench(), SGD(lr=0.3, batch=32)
    rows = [d.train for d in clients.values()]
    mine, theirs = [], []
    for seed in range(4):
        mine.append(ours(Task(lambda: build("mlp:32", SHAPE, 10)), clients, test, 15, plan, seed))
        torch.manual_seed(100 + seed)
        order = lambda _, k: torch.randperm(len(rows[k])).split(32)  # noqa: E731
        theirs.append(referee(build("mlp:32", SHAPE, 10), rows, test, 15, 0.3, order))
    assert min(theirs) > 0.75  # it learns at all (chance is 0.1)
    assert np.mean(mine) == pytest.approx(np.mean(theirs), abs=0.015)  # a point, and a half for chance


def test_mnist_with_feddisks_cnn(data_dir: Path) -> None:
    """Dirichlet 0.1 by class over ten clients."""
    x, y = mnist(np.load(data_dir / "mnist.npz"))
    tables = {"x": x, "y": y}
    rng = np.random.default_rng(0)
    parts: list[list[int]] = [[] for _ in range(10)]
    for label in range(10):
        mine = rng.permutation(np.flatnonzero(y[:2000].numpy() == label))
        cuts = (np.cumsum(rng.dirichlet([0.1] * 10)) * len(mine)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(mine, cuts), strict=True):
            part.extend(piece.tolist())
    rows = [Rows(tables, torch.tensor(p[: len(p) // 32 * 32])) for p in parts if len(p) >= 32]
    clients = {f"c{k}": Data(r, r.take(torch.arange(5)), r.take(torch.arange(5))) for k, r in enumerate(rows)}
    test = Rows(tables, torch.arange(2000, 3000))
    task, plan, rounds = Task(lambda: build("cnn", (1, 28, 28), 10)), SGD(lr=0.05, batch=32), 6

    def order(r: int, k: int) -> Iterable[Tensor | slice]:
        return batches(Fit(lambda *_: torch.zeros(()), {}, rows[k], plan, derive(0, r, f"c{k}", "train", 1)))

    theirs = referee(task.load(task.init(0)), rows, test, rounds, plan.lr, order)
    assert theirs > 0.4
    assert ours(task, clients, test, rounds, plan, 0) == pytest.approx(theirs, abs=0.01)


@pytest.mark.slow
def test_all_of_mnist_in_twenty_rounds(data_dir: Path) -> None:
    """The bar itself: all of MNIST, Dirichlet 0.1, ten clients, FedDisk's CNN, 20 rounds; the split is Kilter's."""
    made = split(load("mnist"), "dirichlet:0.1", clients=10, seed=0)
    task, plan, rounds = Task(lambda: build("cnn", (1, 28, 28), 10)), SGD(lr=0.01, batch=32), 20
    names = list(made.clients)
    rows = [made.clients[n].train for n in names]

    def order(r: int, k: int) -> Iterable[Tensor | slice]:
        return batches(Fit(lambda *_: torch.zeros(()), {}, rows[k], plan, derive(0, r, names[k], "train", 1)))

    theirs = referee(task.load(task.init(0)), rows, made.test, rounds, plan.lr, order)
    mine = ours(task, made.clients, made.test, rounds, plan, 0)
    print(f"hand-written {theirs:.4f}, ours {mine:.4f}")
    assert mine == pytest.approx(theirs, abs=0.01)


def mnist(raw: np.lib.npyio.NpzFile) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 4000 images as floats, whatever the arrays are called."""
    images = next(raw[k] for k in raw.files if raw[k].ndim >= 3 and len(raw[k]) >= 4000)
    labels = next(raw[k] for k in raw.files if raw[k].ndim == 1 and len(raw[k]) == len(images))
    x = torch.tensor(images[:4000]).reshape(-1, 1, 28, 28).float()
    return x / (255 if x.max() > 1 else 1), torch.tensor(labels[:4000]).long()
