"""Every method there is gives the same bits whatever the number of workers. New methods join by being there."""

from __future__ import annotations

from typing import Any

import pytest

from kilter.core import AtNodes
from kilter.federate import federate
from kilter.methods import methods
from kilter.train import SGD
from small import federation, method, normed_task, same, topologies


def everything(name: str, topology: str, workers: int) -> Any:
    run = method(name, normed_task(), cohort=0.75, local=SGD(lr=0.05, batch=16))
    with federation(topology=topology, workers=workers) as fed:
        result = federate(run, fed, 2)
        records = [{k: v for k, v in r.items() if k not in ("seconds", "fit_seconds")} for r in result.rounds]
        kept = {i: s for i, s in fed.states.items() if s}
        state = None if isinstance(result.state, AtNodes) else result.state
        return records, kept, state, result.clients, result.summary | {"seconds": 0, "fit_seconds": {}, "workers": {}}


@pytest.mark.parametrize(("name", "topology"), [(name, t) for name in methods() for t in topologies(name)])
def test_workers_change_nothing(name: str, topology: str) -> None:
    one, two = (everything(name, topology, workers) for workers in (1, 2))
    for part, (a, b) in zip(
        ("records", "node states", "state", "clients", "summary"), zip(one, two, strict=True), strict=True
    ):
        assert same(a, b), part


@pytest.mark.parametrize("name", ["scaffold", "fedbn"])
def test_nor_do_three_workers(name: str) -> None:
    assert same(everything(name, "star", 1), everything(name, "star", 3))
