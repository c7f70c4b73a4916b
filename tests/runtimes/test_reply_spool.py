"""Replies on disk: the same numbers, the same checks, and never more than a few models in memory, however many clients."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import pytest
import torch

from kilter.core import Method, Node, Params, Post, Replies, Unread, step
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.params import average
from kilter.runtimes import reply_spool as pile
from kilter.runtimes.reply_spool import ReplySpool
from kilter.runtimes.simulation import Simulation
from small import federation, method, normed_task, same, table, timeless


@pytest.fixture
def _on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pile, "LIMIT", 0)


def test_the_first_stay_in_memory_and_the_rest_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pile, "LIMIT", 1024)
    replies = [({"w": torch.rand(100), "n": torch.tensor(k)}, k, "x") for k in range(5)]
    made = ReplySpool()
    kept = [made.put(r) for r in replies]
    assert [isinstance(k, Unread) for k in kept] == [False, False, True, True, True]
    assert kept[0] is replies[0]
    actual = Replies({str(k): r for k, r in enumerate(kept)}, of=9)
    for k in (4, 2, 0, 3, 4):  # in any order, and again
        assert same(actual[str(k)], replies[k])
    assert same(list(actual.values()), replies)
    assert same({"0": 1, "a": 2} | actual, {"0": replies[0], "a": 2} | {str(k): replies[k] for k in range(1, 5)})
    post = Post({"a": torch.rand(10_000)})
    assert made.put(post) is post
    assert made.put(None) is None


@pytest.mark.usefixtures("_on_disk")
def test_what_is_read_is_ones_own() -> None:
    actual = Replies({"a": ReplySpool().put(torch.ones(5))}, of=1)
    actual["a"].zero_()
    assert same(actual["a"], torch.ones(5))


@pytest.mark.parametrize(
    ("name", "workers"), [("fedavg", 1), ("fedavg", 2), ("scaffold", 2), ("feddc", 1), ("fedem", 1), ("pooled", 1)]
)
def test_a_run_gives_the_same_bits_and_books(name: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        with federation(workers=workers) as fed:
            result = federate(method(name, normed_task()), fed, 2)
            books = [timeless(r) for r in result.rounds]
            return result.state, fed.states, books

    memory = run()
    monkeypatch.setattr(pile, "LIMIT", 0)
    assert same(run(), memory)


@dataclass(frozen=True, kw_only=True)
class Large(Method):
    """FedAvg without training; counts the models that live while it averages."""

    alive: set[int]
    seen: list[int]
    task: Any = None
    local: Any = None

    def setup(self, fed: Any) -> None:
        return None

    def round(self, fed: Any, state: Any) -> Any:
        return fed.pool(self.train, self.combine, state)

    @step
    def train(self, node: Node, _: Any) -> tuple[Params, int]:
        bad = {"c1": float("nan"), "c2": 1.0}.get(node.id, 0.0)
        w = torch.rand(50_000, generator=node.rng) * (1 + bad)
        self.alive.add(id(w))
        finalize(w, self.alive.discard, id(w))
        return {"w": w}, 1

    @step
    def combine(self, hub: Node, state: Any, replies: Replies) -> Params:
        def counted() -> Any:
            for reply in replies.values():
                self.seen.append(len(self.alive))
                yield reply

        return average(counted())


@pytest.mark.usefixtures("_on_disk")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_average_holds_a_few_models_however_many_clients(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = []
    alive: set[int] = set()

    def room(size: int) -> Any:
        made = torch.empty(size, dtype=torch.uint8).numpy()
        alive.add(id(made))
        finalize(made, alive.discard, id(made))
        return made

    monkeypatch.setattr(pile, "_buffer", room)
    for clients in (8, 64):
        data = table(x=torch.zeros(1, 1), y=torch.zeros(1, 1))
        with Simulation({f"c{k}": data for k in range(clients)}, workers=workers) as fed:
            run = Large(alive=alive, seen=[])
            fed.bind(run)
            run.round(fed, None)
            assert len(run.seen) == clients - 1
            assert [f.node for f in fed.ledger.close().failures] == ["c1"]  # still refused: it is not finite
            most.append(max(run.seen))
    assert 0 < most[0] == most[1] <= 3


@pytest.mark.usefixtures("_on_disk")
def test_a_full_disk_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(28, "No tensor_bytes left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(Mistake, match=r"do not fit into .*No tensor_bytes left.*TMPDIR"):
        federate(method("fedavg"), federation(), 1)
