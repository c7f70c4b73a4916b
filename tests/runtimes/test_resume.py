"""A run killed at any instant and resumed ends with the same bits as one that was not. Processes are really killed.

Each attempt is a fork of this process (torch is already there), killed by SIGKILL: after a random while, or at each of its file
operations in turn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kilter.core import AtNodes
from kilter.fast import switch
from kilter.federate import federate
from kilter.methods import methods
from kilter.records import run_folder as module
from kilter.records import wire
from kilter.records.codec import to_json, to_tree
from kilter.records.run_folder import Store
from kilter.train import SGD
from small import federation, method, normed_task, same, topologies

ROUNDS = 6
Patch = Callable[[], None]


def go(folder: Path, name: str, topology: str, workers: int, rounds: int) -> None:
    """A run, or the rest of one."""
    switch.forget_reports()  # what earlier tests of this process left would become a notice of the first round
    run = method(name, normed_task(), cohort=0.5, local=SGD(lr=0.1, batch=16, momentum=0.5, decay=0.9))
    with federation(topology=topology, workers=workers) as fed:
        federate(run, fed, rounds, store=Store(folder), checkpoint_seconds=0, evaluate_every=2)


def attempt(folder: Path, case: tuple[str, str, int, int], delay: float | None, patch: Patch | None = None) -> bool:
    """Fork, run, kill after a while. Whether it came to its end."""
    child = os.fork()
    if not child:
        try:
            if patch:
                patch()
            go(folder, *case)
        except BaseException:
            (folder.parent / "error.txt").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, (folder.parent / "error.txt").read_text()
    return True


def timeless(tree: Any) -> Any:
    """Without what a clock said."""
    if isinstance(tree, dict):
        return {k: timeless(v) for k, v in tree.items() if k not in ("seconds", "fit_seconds", "workers")}
    if isinstance(tree, AtNodes):
        return "at nodes"
    return type(tree)(map(timeless, tree)) if isinstance(tree, list | tuple) else tree


def outcome(folder: Path) -> dict[str, Any]:
    """Everything a run leaves behind."""
    store = Store(folder)
    checkpoint = store.load()
    assert checkpoint is not None
    store.close()
    model = folder / "model.safetensors"
    return {
        "checkpoint": timeless([to_tree(checkpoint.at), checkpoint.state, checkpoint.role, checkpoint.nodes]),
        "model": model.read_bytes() if model.exists() else b"",
        "rounds": timeless([json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]),
        "summary": timeless(json.loads((folder / "summary.json").read_text())),
        "clients": json.loads((folder / "clients.json").read_text()),
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*")),
    }


def assert_same_outcome(folder: Path, expected: dict[str, Any]) -> None:
    actual = outcome(folder)
    for part, value in expected.items():
        assert same(actual[part], value), part


def kill_and_resume(tmp_path: Path, case: tuple[str, str, int, int], kills: int, seed: int) -> None:
    began = time.monotonic()
    assert attempt(tmp_path / "straight", case, None)
    took = time.monotonic() - began
    expected = outcome(tmp_path / "straight")
    rng = random.Random(seed)
    killed = runs = 0
    while killed < kills:
        folder = tmp_path / f"killed{runs}"
        runs += 1
        while not attempt(folder, case, rng.uniform(0, took) if killed < kills else None):
            killed += 1
        assert_same_outcome(folder, expected)


CORE = ("fedavg", "fedprox", "scaffold", "fedbn", "solo", "pooled")


def cases(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each method under a star, and between peers where it can."""
    return [(name, topology) for name in names for topology in topologies(name)]


@pytest.mark.parametrize(
    ("name", "topology", "workers"),
    [
        *((*case, 1) for case in cases(CORE)),
        ("scaffold", "rotating", 1),
        ("fedavg", "star", 2),
        ("scaffold", "ring", 2),
    ],
)
def test_killed_at_random_and_resumed(tmp_path: Path, name: str, topology: str, workers: int) -> None:
    kill_and_resume(tmp_path, (name, topology, workers, ROUNDS), kills=2, seed=1)  # 28 kills in all


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize(("name", "topology"), cases(methods()))
def test_killed_at_random_many_times(tmp_path: Path, name: str, topology: str, seed: int) -> None:
    kill_and_resume(tmp_path, (name, topology, 1, 10), kills=10, seed=seed)


def die_at(call: int, when: str) -> Patch:
    """SIGKILL to oneself at this file operation: before it, half way, or after it."""
    done = 0
    replace, append, unlink = os.replace, Store.append, Path.unlink

    def now() -> bool:
        nonlocal done
        done += 1
        return done == call

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_replace(a: Any, b: Any) -> None:
        hit = now()
        if hit and when == "half":  # the new file is torn
            with open(a, "r+b") as f:
                f.truncate(os.path.getsize(a) // 2)
        if hit and when != "after":
            die()
        replace(a, b)
        if hit:
            die()

    def dying_append(self: Store, record: Any) -> None:
        hit = now()
        if hit and when == "half":
            with open(self.path("rounds.jsonl"), "a") as f:
                f.write(to_json(record)[: len(to_json(record)) // 2])
        if hit and when != "after":
            die()
        append(self, record)
        if hit:
            die()

    def dying_unlink(self: Path, missing_ok: bool = False) -> None:
        hit = now()
        if hit and when != "after":
            die()
        unlink(self, missing_ok)
        if hit:
            die()

    def patch() -> None:
        module.os.replace = dying_replace  # type: ignore[assignment]
        Store.append = dying_append  # type: ignore[method-assign]
        Path.unlink = dying_unlink  # type: ignore[method-assign]

    return patch


@pytest.mark.parametrize("when", ["before", "half", pytest.param("after", marks=pytest.mark.slow)])
def test_killed_at_every_file_operation(tmp_path: Path, when: str) -> None:
    case = ("scaffold", "star", 1, 2)
    assert attempt(tmp_path / "straight", case, None)
    expected = outcome(tmp_path / "straight")
    for call in range(1, 100):
        folder = tmp_path / f"at{call}"
        if attempt(folder, case, None, die_at(call, when)):  # it has fewer operations than that
            assert call > 12  # rewind, append, save; 2 rounds of append, 2 nodes, checkpoint, clean; 3 results
            return
        assert attempt(folder, case, None)
        assert_same_outcome(folder, expected)
    pytest.fail("the run never came to its end")


def test_killed_in_every_attempt_it_still_gets_on(tmp_path: Path) -> None:
    """Each attempt dies at its tenth file operation, so only what the last one saved brings the next further."""
    case = ("scaffold", "ring", 1, 5)
    assert attempt(tmp_path / "straight", case, None)
    tries = 1
    while not attempt(tmp_path / "run", case, None, die_at(10, "after")):
        tries += 1
        assert tries < 30
    assert tries > 2
    assert_same_outcome(tmp_path / "run", outcome(tmp_path / "straight"))


def test_a_checkpoint_holds_no_pickle_and_can_be_read_alone(tmp_path: Path) -> None:
    go(tmp_path, "scaffold", "star", 1, 1)
    files = [*tmp_path.glob("*.safetensors"), *tmp_path.glob("nodes/*.safetensors")]
    assert len(files) == 5  # checkpoint, last and best model, two nodes of the cohort
    saved = wire.decode((tmp_path / "checkpoint.safetensors").read_bytes())
    assert set(saved) == {"round", "nodes", "checksums", "rounds", "progress", "experiment"}
    assert saved["round"] == 1
