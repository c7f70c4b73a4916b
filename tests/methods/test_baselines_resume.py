"""What clients keep survives: every baseline, stopped and resumed, ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kilter.federate import federate
from kilter.records.run_folder import Store
from small import federation, method, normed_task, same

NAMES = ["fedrep", "fedrod", "moon", "fedcurv", "feddc", "fedem", "fedmix", "clustered", "cm", "fedpcl", "fedmd"]


class Stop(Exception):
    pass


def stop_after(round: int) -> Any:
    def watch(record: dict[str, Any]) -> None:
        if record["round"] == round:
            raise Stop

    return watch


@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    settings = {"pretrain": 2} if name in ("fedpcl", "fedmd") else {"warm": 1} if name == "clustered" else {}
    run = method(name, normed_task(), cohort=0.75, **settings)
    options: dict[str, Any] = {"checkpoint_seconds": 0, "evaluate_every": 4}
    with federation() as fed:
        straight = federate(run, fed, 4, **options)
        kept = dict(fed.states)
    store = Store(tmp_path / "run")
    with federation() as fed, pytest.raises(Stop):
        federate(run, fed, 4, store=store, watch=stop_after(2), **options)
    with federation() as fed:
        resumed = federate(run, fed, 4, store=store, **options)
        assert same(resumed.state, straight.state)
        assert {i: s for i, s in fed.states.items() if s}.keys() == {i: s for i, s in kept.items() if s}.keys()
        assert all(same(fed.states[i], s) for i, s in kept.items() if s)
    assert resumed.summary["client_accuracy"] == straight.summary["client_accuracy"]


@pytest.mark.parametrize("name", NAMES)
def test_some_do_not_answer(name: str) -> None:
    """A third of all calls are lost, in the set-up too."""
    from kilter.runtimes.simulation import Missing

    settings = {"pretrain": 2} if name in ("fedpcl", "fedmd") else {"warm": 0} if name == "clustered" else {}
    with federation(faults=Missing(0.35), seed=3) as fed:
        result = federate(method(name, normed_task(), **settings), fed, 4, evaluate_every=4)
    assert result.summary["failures"] > 0
    assert all(x == x for x in result.summary["client_accuracy"].values())
