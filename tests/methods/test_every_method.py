"""Laws of all methods: one client, one seed, test rows, stopping and resuming, lost replies, workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from acting import run, states, together
from torch import nn

from kilter.core import AtNodes, Data, Fit, Rows
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods import methods
from kilter.records.run_folder import Store
from kilter.seeds import derive
from kilter.tasks import augment
from kilter.train import SGD, batches
from small import (
    bench,
    digits,
    federation,
    method,
    mlp_task,
    near,
    normed_task,
    same,
    skewed,
    timeless,
    topologies,
)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "scaffold", "pooled", "solo"])
def test_one_client_is_plain_sgd(name: str) -> None:
    """A hand-written loop with torch.optim over the same batches. SCAFFOLD: c = c_i, so no correction."""
    clients = {"only": skewed()["c3"]}
    task = mlp_task()
    plan = SGD(lr=0.1, batch=16, epochs=2)
    result, kept = states(name, clients, 3, task, local=plan)
    net = task.load(task.init(0)).train()
    rows = clients["only"].train
    who = "server" if name == "pooled" else "only"
    for round in (1, 2, 3):
        optim = torch.optim.SGD(net.parameters(), lr=0.1)
        fit = Fit(lambda *_: torch.zeros(()), {}, rows, plan, derive(0, round, who, "train", 1))
        for at in batches(fit):
            batch = rows.batch(at)
            optim.zero_grad()
            nn.functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
            optim.step()
    actual = kept["only"]["w"] if name == "solo" else result.state[0] if name == "scaffold" else result.state
    if name == "scaffold":
        assert near(actual, dict(net.state_dict()), 1e-5)
    else:
        assert same(actual, dict(net.state_dict()))


def test_the_seed_determines_the_result() -> None:
    clients = skewed()
    a, b = run("fedavg", clients, 2, seed=4), run("fedavg", clients, 2, seed=4)
    assert same(a.state, b.state)
    assert timeless(a.summary) == timeless(b.summary)
    assert not near(a.state, run("fedavg", clients, 2, seed=5).state, 1e-3)


QUICKLY: dict[str, dict[str, Any]] = {
    "slfed": {"pictures": 4},
    "feddisk": {"density_rounds": 1, "own_epochs": 1},
    "fedpcl": {"pretrain": 1},
}


@pytest.mark.parametrize("name", methods())
def test_augmentation_reaches_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss of its own, a method could leave --augment without effect. Stacked and alone give the same."""
    seen: list[int] = []
    monkeypatch.setitem(augment.IMAGES, "flip", lambda x: seen.append(1) or x.flip(-1))
    task = mlp_task(augment="flip")
    trained = []
    for stack in (True, False):
        seen.clear()
        topology = "full" if "everyone" in methods()[name].needs else "star"
        with federation(3, stack=stack, topology=topology) as fed:
            trained.append(federate(method(name, task, **QUICKLY.get(name, {})), fed, 2, evaluate_every=2).model)
        assert seen
    if isinstance(trained[0], dict):
        assert near(*trained, 1e-5)


@pytest.mark.parametrize("name", ["moon", "fedrod", "fedmix"])
def test_a_loss_of_its_own_cannot_mix_rows(name: str) -> None:
    with pytest.raises(Mistake, match="leave mixup out of --augment"):
        method(name, mlp_task(augment="mixup"))


def test_no_test_row_reaches_training() -> None:
    """Changing every test and validation label, and the common test set, changes nothing that is trained."""
    clients = skewed()
    used = torch.zeros(len(digits()), dtype=torch.bool)
    used[together(clients).index] = True
    tables = digits().tables
    wrong = dict(tables) | {"y": torch.where(used, tables["y"], (tables["y"] + 1) % 10)}
    fooled = {i: Data(*(Rows(wrong, r.index) for r in (d.train, d.valid, d.test))) for i, d in clients.items()}
    for name in ("fedavg", "scaffold", "fedbn"):
        assert same(run(name, clients, 2, bench=bench()).state, run(name, fooled, 2, bench=bench()).state)


NAMES = ["fedrep", "fedrod", "moon", "fedcurv", "feddc", "fedem", "fedmix", "clustered", "cm", "fedpcl", "fedmd"]


class Stop(Exception):
    pass


def stop_after(round: int) -> Any:
    def watch(record: dict[str, Any]) -> None:
        if record.round == round:
            raise Stop

    return watch


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_identical(name: str, tmp_path: Path) -> None:
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
    assert resumed.summary.client_accuracy == straight.summary.client_accuracy


@pytest.mark.parametrize("name", NAMES)
def test_a_third_of_all_replies_may_be_lost(name: str) -> None:
    """A third of all calls are lost, in the set-up too."""
    from kilter.runtimes.simulation import Missing

    settings = {"pretrain": 2} if name in ("fedpcl", "fedmd") else {"warm": 0} if name == "clustered" else {}
    with federation(faults=Missing(0.35), seed=3) as fed:
        result = federate(method(name, normed_task(), **settings), fed, 4, evaluate_every=4)
    assert result.summary.failures > 0
    assert 0 <= result.summary.client_accuracy.min <= result.summary.client_accuracy.max <= 1
    assert any("a reply did not come" in notice.what for notice in result.summary.notices)


def everything(name: str, topology: str, workers: int) -> Any:
    run = method(name, normed_task(), cohort=1.0 if topology == "full" else 0.75, local=SGD(lr=0.05, batch=16))
    with federation(topology=topology, workers=workers) as fed:
        result = federate(run, fed, 2)
        records = [timeless(r) for r in result.rounds]
        kept = {i: s for i, s in fed.states.items() if s}
        state = None if isinstance(result.state, AtNodes) else result.state
        return records, kept, state, list(result.clients.items()), timeless(result.summary)


@pytest.mark.parametrize(("name", "topology"), [(name, t) for name in methods() for t in topologies(name)])
def test_two_workers_give_the_same_bits(name: str, topology: str) -> None:
    one, two = (everything(name, topology, workers) for workers in (1, 2))
    for part, (a, b) in zip(
        ("records", "node states", "state", "clients", "summary"), zip(one, two, strict=True), strict=True
    ):
        assert same(a, b), part


@pytest.mark.parametrize("name", ["scaffold", "fedbn"])
def test_three_workers_give_the_same_bits(name: str) -> None:
    assert same(everything(name, "star", 1), everything(name, "star", 3))
