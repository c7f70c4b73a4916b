"""A step played by hand: its requests to train are seen, and performed one by one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from kilter.core import SERVER, Data, Fit, Method, Node, Params, Rows, Tree
from kilter.federate import Result, federate
from kilter.runtimes.simulation import Simulation
from kilter.runtimes.step_runner import run_step
from kilter.tasks import Task
from kilter.train import SGD, run_one
from small import (
    digits,
    federation,
    method,
    same,
)

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


FULL = SGD(lr=0.1, batch=0)  # one full-batch step a round


def run(name: str, clients: dict[str, Data], rounds: int = 1, task: Task | None = None, **settings: Any) -> Result:
    seed = settings.pop("seed", 0)
    with Simulation(clients, bench=settings.pop("bench", None), seed=seed, stack=False) as fed:
        return federate(method(name, task, **settings), fed, rounds)


def states(name: str, clients: dict[str, Data], rounds: int, task: Task | None = None, **settings: Any) -> Any:
    with Simulation(clients, stack=False, topology=settings.pop("topology", "star")) as fed:
        result = federate(method(name, task, **settings), fed, rounds)
        return result, {i: s for i, s in fed.states.items() if i in clients}


def together(clients: dict[str, Data]) -> Rows:
    return Rows(digits().tables, torch.cat([d.train.index for d in clients.values()]))


def at_node(
    run: Method, data: Data, message: Any, state: dict[str, Any] | None = None, **more: Any
) -> tuple[Any, Node]:
    """One node's train step by itself: its reply, and the node."""
    node = Node("a", data, state=state or {}, step="train", **more)
    (done,) = run_step(run.train, [node], [message])  # type: ignore[attr-defined]
    if done.error:
        raise done.error
    return done.reply, node
