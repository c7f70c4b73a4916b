"""fluke: its clients, server and FedAvg, FedProx or SCAFFOLD; `--threads` is torch's.

fluke imports packages that this run never calls (torchvision for its data sets, wandb and clearml for its loggers, ...): empty
stand-ins take their places, so that they need not be installed.
"""

# ruff: noqa: E402

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

import torchmetrics  # noqa: F401 - before the stand-ins: it looks for the real ones

for unused in (
    "torchvision",
    "torchvision.datasets",
    "torchvision.datasets.utils",
    "torchvision.models",
    "torchvision.transforms",
    "datasets",
    "wandb",
    "clearml",
    "opacus",
):
    sys.modules[unused] = MagicMock()

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedprox import FedProx
from fluke.algorithms.scaffold import SCAFFOLD
from fluke.data import FastDataLoader
from fluke.utils import ClientObserver, FederationObserver

from work import BATCH, LR, MU, Watch, accuracy, network, order, rows, table

task = order()
work = task.work
torch.set_num_threads(task.threads)
FlukeENV().set_device(task.device)
x, y = table(task.folder, work.data, "train")
watch = Watch()
totals = [0, 0.0]  # steps, sum of losses


class Rows:
    """Stands for a DataSplitter: gives each client its own rows."""

    def assign(self, clients: int, batch_size: int) -> Any:
        loaders = [
            FastDataLoader(x[own], y[own], num_labels=10, batch_size=batch_size, shuffle=True) for own in rows(work)
        ]
        return (loaders, [None] * clients), None


class Counted(torch.optim.SGD):
    """SGD that counts its steps."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        totals[0] += 1
        return super().step(*args, **kwargs)


class RoundWatch(ClientObserver, FederationObserver):
    """Says when a round has ended."""

    def end_fit(self, loss: float, **_: Any) -> None:
        totals[1] += loss

    def end_round(self, round: int) -> None:
        watch.tick(totals[0], totals[1] / work.sampled)
        totals[:] = [0, 0.0]


FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
client = {"batch_size": BATCH, "local_epochs": 1, "loss": "CrossEntropyLoss", "scheduler": {"step_size": 1, "gamma": 1}}
client |= {"optimizer": {"name": Counted, "lr": LR}} | ({"mu": MU} if work.method == "fedprox" else {})
net = network(work.model)
settings = DDict(client=DDict(client), server=DDict(weighted=True), model=net)
kind = {"fedavg": FedAVG, "fedprox": FedProx, "scaffold": SCAFFOLD}[work.method]
algorithm = kind(work.clients, Rows(), settings)
algorithm.set_callbacks([RoundWatch()])
algorithm.run(work.rounds, work.sampled / work.clients)
watch.end(accuracy=accuracy(algorithm.server.model, task.folder, work.data))
