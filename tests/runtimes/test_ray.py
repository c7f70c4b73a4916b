"""A Ray cluster gives the simulator's numbers, also when one of its machines dies in the middle of a step.

The cluster is real: two nodes started with `ray start`, each a machine of its own to Ray.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.federate import federate
from kilter.records import wire
from kilter.runtimes.ray import GPU_SHARE, RayCluster, Seats, _read_rows, _rows, connect, simulate_at
from small import bench, public, same, skewed, timeless

HERE = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HERE, reason="ray is not installed: pip install 'kilter[ray]'")
EXPERIMENT = {"data": "digits", "rows": 400, "clients": 12, "rounds": 4, "model": "cnn", "local": {"lr": 0.05}}
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",  # machines of CI are busy
    "RAY_AUTH_MODE": "token",  # a cluster of our own, with a password of its own
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
os.environ.update(SETTINGS)  # now, for Ray reads them when it is imported, and nobody else does


def test_rows_travel_with_every_table_once() -> None:
    clients = skewed(5)
    letter, tables = _rows(clients, bench(), public())
    assert len(tables) == 2  # x and y
    actual, seen, given = _read_rows(letter, tables)
    assert list(actual) == list(clients)
    for i, data in clients.items():
        for part in ("train", "valid", "test"):
            assert same(getattr(actual[i], part).batch(), getattr(data, part).batch())
    assert same(seen.batch(), bench().batch())  # type: ignore[union-attr]
    assert same(given.batch(), public().batch())  # type: ignore[union-attr]
    assert actual["c0"].train.tables["x"] is actual["c1"].test.tables["x"]
    assert _read_rows(*_rows(clients, None, None))[1:] == (None, None)


@pytest.mark.skipif(HERE, reason="ray is installed")
def test_without_ray_one_sentence_says_what_to_install() -> None:
    with pytest.raises(Mistake, match=r"Ray is not installed here: .*kilter\[ray\]"):
        connect("")


@needs_ray
def test_a_cluster_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(Mistake, match=r"No Ray cluster answers at '127.0.0.1:1'.*ray start --head"):
        connect("127.0.0.1:1")


class Machine:
    """A node of a Ray cluster, as its own processes."""

    def __init__(self, folder: str, *options: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "1", *options]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.log = open(f"{folder}/{options[0].strip('-')}.log", "w")  # noqa: SIM115 - as long as the machine
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=self.log, start_new_session=True)

    def pids(self) -> list[int]:
        """Everything that runs on it."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
        actual = [self.process.pid]
        for pid in actual:
            actual += [child for child, parent in parents.items() if parent == pid]
        return actual

    def die(self) -> None:
        slay(self.pids())
        self.process.wait()
        self.log.close()


def slay(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def head() -> Iterator[tuple[Machine, str, str]]:
    folder = tempfile.mkdtemp(prefix="kray")  # short: it holds sockets
    port = free_port()
    where = f"127.0.0.1:{port}"
    machine = Machine(
        folder, "--head", "--port", str(port), "--include-dashboard", "false",
        "--object-store-memory", "100000000", "--temp-dir", folder,
    )  # fmt: skip
    try:
        until(lambda: listens(port))
        yield machine, where, folder
    finally:
        machine.die()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        actual: int = s.getsockname()[1]
        return actual


def until(what: Any, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def outcome(fed: Any, run: Any, watch: Any = None) -> Any:
    result = federate(run, fed, EXPERIMENT["rounds"], evaluate_every=2, watch=watch)  # type: ignore[arg-type]
    books = [timeless(r) for r in result.rounds]
    return result.state, fed.states, books, result.clients


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_share_the_gpus_of_a_cluster() -> None:
    import ray

    experiment = Experiment.of({**EXPERIMENT, "method": "fedavg"})  # trains on the CPU: these GPUs are only counted
    ray.init(address="local", num_cpus=6, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        _, fed = experiment.build("auto", simulate_at(""))
        with fed:
            assert isinstance(fed, RayCluster)
            seats = Seats(None, wire.encode(fed._terms), *_rows(fed.clients, fed.bench, fed.public), gpu=True)
            seats._invite()
            assert len(seats._coming) == 1 / GPU_SHARE  # not six, the number of processors
            ray.wait(list(seats._coming), num_returns=len(seats._coming), timeout=240)
            until(lambda: ray.available_resources().get("GPU", 0.0) == 0.0)
            seats.close()
    finally:
        ray.shutdown()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_dies_in_the_middle_of_a_step_changes_no_bit(
    head: tuple[Machine, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    _, where, folder = head
    experiment = Experiment.of({**EXPERIMENT, "method": "scaffold"})  # nodes keep something
    run, fed = experiment.build()
    with fed:
        simulated = outcome(fed, run)
    run, fed = experiment.build("auto", simulate_at(where))  # joins the head, the only machine there is
    second = Machine(
        folder, "--address", where, "--object-store-memory", "100000000"
    )  # fmt: skip
    killed = threading.Event()

    def kill() -> None:
        pool: Any = fed._pool
        pids = second.pids()
        until(lambda: fed.round == 3 and len(pool._busy) == 2)
        slay(pids)
        killed.set()

    def watch(record: dict[str, Any]) -> None:
        if record.round == 2:
            pool: Any = fed._pool
            until(lambda: len(pool._coming) + len(pool._idle) == 2 or pool._invite())
            ray.wait(list(pool._coming), num_returns=len(pool._coming), timeout=240)  # both take part in round 3
            threading.Thread(target=kill).start()

    try:
        with fed, caplog.at_level(logging.WARNING, logger="kilter"):
            until(lambda: ray.cluster_resources().get("CPU") == 2)
            clustered = outcome(fed, run, watch)
    finally:
        second.die()
    assert killed.is_set()
    assert "was lost" in caplog.text
    for part, ours, theirs in zip(("state", "node states", "books", "clients"), simulated, clustered, strict=True):
        assert same(ours, theirs), part
