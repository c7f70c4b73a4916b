"""What a round of each method sends, measured on a small federation in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kilter.core import Data, Method, Rows
from kilter.methods.fedavg import FedAvg
from kilter.models import build
from kilter.runtimes.simulation import Simulation
from kilter.seeds import generator
from kilter.tasks import Task
from kilter.train import SGD

SHAPE, CLASSES, CLIENTS, ROWS = (1, 16, 16), 10, 4, 12  # small, but the network is larger than a letter's header
MODEL = "mlp:64"


@dataclass(frozen=True)
class Cost:
    """Bytes sent and received by all nodes, as multiples of one round of FedAvg under the same topology."""

    round: float  # a round
    once: float  # before and in the first round, beyond that

    def __str__(self) -> str:
        """
        >>> print(Cost(round=2, once=0.5))
        2.00 x FedAvg's bytes a round, and 0.50 x once
        """
        once = f", and {self.once:.2f} x once" if self.once >= 0.005 else ""
        return f"{self.round:.2f} x FedAvg's bytes a round{once}"


def costs(kinds: Mapping[str, type[Method]]) -> dict[str, Cost]:
    """What the second round of each method costs, and what was sent before it. Peers write to all others."""
    fedavg = {spec: _traffic(FedAvg, spec)[2] for spec in ("star", "full")}
    measured = {}
    for name, kind in kinds.items():
        spec = "full" if "everyone" in kind.needs else "star"
        before, first, second = _traffic(kind, spec)
        measured[name] = Cost(second / fedavg[spec], max(0, before + first - second) / fedavg[spec])
    return measured


def _traffic(kind: type[Method], spec: str) -> tuple[int, int, int]:
    """Bytes of the set-up and of two rounds."""
    with federation(spec) as fed:
        method = instance(kind)
        fed.bind(method)
        fed.rounds = 9  # so that the second round is not the last
        state, sizes = method.setup(fed), []
        for round in (0, 1, 2):
            if round:
                fed.round = round
                state = method.round(fed, state)
            record = fed.ledger.close()
            sizes.append(record.bytes_up + record.bytes_down)
    return sizes[0], sizes[1], sizes[2]


def instance(kind: type[Method]) -> Method:
    """A method with default settings for the small federation."""
    return kind(task=Task(lambda: build(MODEL, SHAPE, CLASSES)), local=SGD(batch=0))


def federation(spec: str) -> Simulation:
    """The small federation."""

    def rows(name: str, n: int) -> Rows:
        x = torch.rand(n, *SHAPE, generator=generator("methods", name))
        return Rows.of(x=x, y=torch.arange(n) % CLASSES)

    clients = {f"c{k}": Data(*(rows(f"{k} {part}", ROWS) for part in range(3))) for k in range(CLIENTS)}
    return Simulation(clients, public=rows("public", CLASSES), topology=spec, stack=False)
