"""A step played by hand: its requests to train are seen, and performed one by one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from kilter.core import SERVER, Data, Fit, Node, Params, Rows, Tree
from kilter.federate import federate
from kilter.train import run_one
from small import federation, method, same

NOTHING = Rows({}, torch.empty(0, dtype=torch.int64))


def play(work: Generator[Fit, Params, Any]) -> tuple[Any, list[Fit], list[Params]]:
    """What a step returns, the fits it asked for, and what came of them."""
    asked: list[Fit] = []
    came: list[Params] = []
    try:
        asked.append(next(work))
        while True:
            came.append(run_one(asked[-1]).params)
            asked.append(work.send(came[-1]))
    except StopIteration as end:
        return end.value, asked, came


def hub(round: int = 1, public: Rows | None = None, step: str = "combine") -> Node:
    return Node(SERVER, Data(NOTHING, NOTHING, NOTHING), round=round, step=step, public=public)


def models(name: str, rounds: int = 2, clients: Any = 4, **settings: Any) -> Tree:
    """The global model after some rounds, trained one by one."""
    options = {} if isinstance(clients, int) else {"bench": None}  # a toy has no common test set
    with federation(clients, stack=False, **options) as fed:
        return federate(method(name, **settings), fed, rounds, evaluate_every=rounds).model


def is_fedavg(name: str, rounds: int = 2, clients: Any = 4, task: Any = None, **settings: Any) -> bool:
    """Whether a method with these settings gives FedAvg's model, bit for bit."""
    return same(models(name, rounds, clients, task=task, **settings), models("fedavg", rounds, clients, task=task))
