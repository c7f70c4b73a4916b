"""Worker processes: what they are handed, how many there are, and that a step's mishaps are told for what they are."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kilter.core import Each, Method, Node, step
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.records.run_folder import Store
from kilter.runtimes import simulation
from kilter.runtimes.autotune import AutoTuner, WorkSplit, cores
from kilter.runtimes.shared_memory import SharedFile
from kilter.runtimes.simulation import Simulation
from kilter.runtimes.step_runner import StepFailed
from small import federation, method, normed_task, same, timeless


@dataclass(frozen=True, kw_only=True)
class Odd(Method):
    """Steps that return, keep or do what they should not."""

    task: Any = None
    local: Any = None

    def setup(self, fed: Any) -> None: ...

    def round(self, fed: Any, state: None) -> None: ...

    @step(alike=False)
    def answer(self, node: Node, message: Any) -> Any:
        if node.id == "c1" and message == "exit":
            sys.exit(3)
        if node.id == "c1" and message == "leave":
            os._exit(3)
        if node.id == "c1" and message == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if node.id == "c1" and message == "keep":
            node.state["open"] = object()
        odd = {"complex": torch.ones(2, dtype=torch.complex64), "object": object(), "key": {1: 2}, "set": {1}}
        return odd.get(message, message) if node.id == "c1" and isinstance(message, str) else message


def odd(fed: Simulation) -> Simulation:
    fed.bind(Odd())
    return fed


@pytest.mark.parametrize("how", ["complex", "object", "key", "set", "keep"])
def test_a_reply_that_cannot_be_sent_is_that_clients_failure_and_the_worker_lives_on(how: str) -> None:
    with odd(federation(workers=2)) as fed:
        assert list(fed.map(Odd().answer, how)) == ["c0", "c2", "c3"]
        (failure,) = fed.ledger.close().failures
        assert (failure.node, failure.kind) == ("c1", "error")
        assert re.search("cannot be sent: .*(sent|strings)", failure.reason)
        with pytest.raises(StepFailed, match=r"failed at every client: .*cannot be sent: .*(sent|strings)"):
            fed.map(Odd().answer, how, to=["c1"])
        assert fed.map(Odd().answer, 5) == dict.fromkeys(fed.ids, 5)


def test_a_step_that_wants_to_exit_does_not() -> None:
    with odd(federation(workers=2)) as fed:
        assert list(fed.map(Odd().answer, "exit")) == ["c0", "c2", "c3"]
        (failure,) = fed.ledger.close().failures
        assert "SystemExit: 3" in failure.reason
        assert fed.map(Odd().answer, 5) == dict.fromkeys(fed.ids, 5)


def test_a_worker_that_went_away_is_not_said_to_lack_memory() -> None:
    with odd(federation(workers=2)) as fed:
        with pytest.raises(Mistake, match=r"died \(exit code 3\): resume the run") as actual:
            fed.map(Odd().answer, "leave")
        assert "memory" not in str(actual.value)


def test_a_killed_worker_is_one_clear_sentence_and_leaves_nobody_behind() -> None:
    with odd(federation(workers=2)) as fed:
        assert fed._pool is not None
        processes = fed._pool._processes
        with pytest.raises(Mistake, match=r"worker process died .*-9.*resume"):
            fed.map(Odd().answer, "die")
    assert not any(p.is_alive() for p in processes)


def test_a_worker_killed_between_rounds_is_noticed_too() -> None:
    with odd(federation(workers=2)) as fed:
        fed.map(Odd().answer, 1)
        victim = fed._pool._processes[0]  # type: ignore[union-attr]
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        with pytest.raises(Mistake, match="worker process died"):
            fed.map(Odd().answer, 1)


def test_workers_hold_no_lock_of_the_store(tmp_path: Any) -> None:
    """Workers may outlive a killed run by a step; the run can be resumed at once all the same."""
    store = Store(tmp_path)
    with odd(federation(workers=2)) as fed:
        fed.map(Odd().answer)
        store.close()
        Store(tmp_path).close()
        assert all(p.is_alive() for p in fed._pool._processes)  # type: ignore[union-attr]


def test_there_are_never_more_workers_than_nodes() -> None:
    with odd(federation(workers=50)) as fed:
        assert len(fed._pool._processes) == 4  # type: ignore[union-attr]


def test_a_broadcast_is_written_once_and_what_differs_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = SharedFile.write

    def counted(self: SharedFile, tree: Any) -> bytes:
        packet = write(self, tree)
        sizes.append(len(packet))
        return packet

    monkeypatch.setattr(SharedFile, "write", counted)
    w = {"w": torch.rand(100_000)}
    with federation(8, workers=3) as fed:
        fed.bind(Odd())
        assert same(dict(fed.map(Odd().answer, w)), dict.fromkeys(fed.ids, w))
        assert len(sizes) == 1 + 8  # once for all, and an order for each chunk
        assert max(sizes) < 1000  # through pipes goes only where the numbers lie
        each = Each({i: {"w": torch.full((k + 1,), float(k))} for k, i in enumerate(fed.ids)})
        assert same(dict(fed.map(Odd().answer, each)), dict(each))


def test_a_board_grows_and_what_was_read_stays() -> None:
    board = SharedFile()
    small, large = {"w": torch.ones(3)}, {"w": torch.arange(5000.0), "n": 1}
    first = board.read(board.write(small))
    assert same(board.read(board.write(large)), large)
    assert same(first, small)
    assert same(board.read(board.write(small)), small)
    assert board.read(board.write((1, None))) == (1, None)


# --workers auto -------------------------------------------------------------------------------------------------------


def raced(pace: AutoTuner, cost: Callable[[int, int], float], calls: int, chunks: int = 1) -> list[tuple[int, int]]:
    chosen = []
    for _ in range(calls):
        chosen.append(pace.choose("train", chunks))
        pace.record("train", chosen[-1], cost(*chosen[-1]) * 7, 7)
    return [tuple(share) for share in chosen]


def workers(pace: AutoTuner, cost: Callable[[int], float], calls: int) -> list[int]:
    return [n for n, _ in raced(pace, lambda n, _: cost(n), calls)]


def test_the_fastest_number_of_workers_is_found_and_kept() -> None:
    assert workers(AutoTuner(2), lambda n: 1 / n, 6) == [2, 2, 1, 1, 2, 2]
    assert workers(AutoTuner(2), lambda n: float(n), 6) == [2, 2, 1, 1, 1, 1]
    assert workers(AutoTuner(1), lambda n: 1.0, 3) == [1, 1, 1]


def test_one_does_not_go_on_where_fewer_are_slower() -> None:
    assert workers(AutoTuner(64), lambda n: 1 / n, 6) == [64, 64, 32, 32, 64, 64]
    assert workers(AutoTuner(12), lambda n: abs(n - 5.0), 9) == [12, 12, 6, 6, 3, 3, 6, 6, 6]


def test_the_fastest_size_of_orders_is_found_for_the_fastest_number_of_workers() -> None:
    one, two, four, eight = (2, 1), (2, 2), (2, 4), (2, 8)
    rising = raced(AutoTuner(2, least=2), lambda n, k: 1 / k, 9, chunks=16)
    assert rising == [one, one, two, two, four, four, eight, eight, eight]
    assert raced(AutoTuner(2, least=2), lambda n, k: abs(k - 2), 8, chunks=16) == [
        one,
        one,
        two,
        two,
        four,
        four,
        two,
        two,
    ]
    assert raced(AutoTuner(2), lambda n, k: 1 / n, 8, chunks=4) == [one, one, (1, 1), (1, 1), two, two, two, two]
    assert raced(AutoTuner(2), lambda n, k: n / k, 6, chunks=40) == [one, one, *[(1, 1)] * 4]  # nobody to order


def test_no_worker_has_more_to_do_for_larger_orders() -> None:
    pace = AutoTuner(2, least=2)
    raced(pace, lambda n, k: 1 / k, 9, chunks=16)
    chosen = {chunks: pace.choose("train", chunks).chunks for chunks in (1, 2, 3, 4, 7, 8, 10, 16, 20)}
    assert chosen == {1: 1, 2: 1, 3: 2, 4: 2, 7: 4, 8: 4, 10: 1, 16: 8, 20: 2}


def test_warming_up_is_forgiven_and_steps_are_timed_apart() -> None:
    pace = AutoTuner(2)
    for seconds in (9.0, 1.0):
        pace.record("train", pace.choose("train", 2), seconds, 1)
    for seconds in (2.0, 2.0):
        pace.record("train", pace.choose("train", 2), seconds, 1)
    assert pace.choose("train", 2) == (2, 1)
    pace.record(":evaluate", WorkSplit(2), 1.0, 0)  # nobody was there
    assert pace.choose(":evaluate", 2) == (2, 1)
    assert pace.timings.keys() == {"train", ":evaluate"}


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_auto_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(workers: Any) -> Any:
        with federation(6, workers=workers) as fed:
            result = federate(method(name, normed_task()), fed, 3)
            books = [timeless(r) for r in result.rounds]
            return result.state, fed.states, books

    one = run(1)
    monkeypatch.setattr(simulation, "cores", lambda: 3)
    turns = iter([(3, 1), (1, 1), (2, 2), (3, 3), (1, 1), (2, 1), (2, 3), (1, 1), (3, 2)])
    monkeypatch.setattr(AutoTuner, "choose", lambda self, step, chunks: WorkSplit(*next(turns)))
    assert same(run("auto"), one)


def test_auto_is_at_most_one_worker_a_core_or_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() >= 1
    monkeypatch.setattr(simulation, "cores", lambda: 1)
    with federation(workers="auto") as fed:
        assert fed.workers == 1
    monkeypatch.setattr(simulation, "cores", lambda: 100)
    with federation(workers="auto") as fed:
        assert fed.workers == len(fed.ids)
