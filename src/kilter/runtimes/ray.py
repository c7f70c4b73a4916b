"""The simulation on a Ray cluster: the same chunks of clients, performed wherever a processor of the cluster is free.

What travels is arrays and letters, never code: every cluster node has kilter installed and finds the method by its
name. The tables of rows go once into Ray's object store, which the seats of a machine share. What nodes keep stays with the driver
and goes along with each order; so whatever is lost with a machine is done again elsewhere, and comes out the same.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kilter.core import Data, Rows, Tree
from kilter.errors import Mistake
from kilter.experiment import Experiment, MakeSimulation
from kilter.plugins import is_file_spec
from kilter.records import wire
from kilter.records.versions import versions
from kilter.runtimes.autotune import WorkSplit
from kilter.runtimes.simulation import Fault, Simulation
from kilter.runtimes.step_runner import Done
from kilter.runtimes.worker_messages import State, decode_outcomes, encode_failure, encode_outcomes, encode_sendable
from kilter.topology import Topology

PATIENCE = 300.0  # seconds to wait for a cluster in which nothing runs
GPU_SHARE = 0.25  # of a GPU for each process, where one is used
LOSSES = 4  # so often a chunk may be lost before we think that it is to blame

Handle = Any  # a process of the cluster, or an answer that it will give

log = logging.getLogger("kilter")


class RayCluster(Simulation):
    """A simulation whose steps are performed by the processors of a Ray cluster; `address` "" makes one of this machine.

    `workers` processors at most; "auto": all there are, also those that join later.
    """

    def __init__(
        self,
        clients: Mapping[str, Data],
        experiment: Experiment,
        *,
        address: str = "",
        bench: Rows | None = None,
        public: Rows | None = None,
        seed: int = 0,
        topology: str = "star",
        workers: int | Literal["auto"] = "auto",
        faults: Fault | None = None,
        plain: bool = False,
        device: str = "cpu",
        precision: str = "fp32",
        facts: Mapping[str, Tree],
    ) -> None:
        super().__init__(
            clients,
            bench=bench,
            public=public,
            topology=topology,
            seed=seed,
            faults=faults,
            plain=plain,
            device=device,
            precision=precision,
        )
        if workers != "auto" and workers < 1:
            raise Mistake(f"There must be at least one worker, not {workers}.")
        self._most = None if workers == "auto" else workers
        self._terms = {"experiment": _absolute(experiment).write(), "facts": facts}
        self._ours = connect(address)

    def start_workers(self) -> Seats:
        return Seats(
            self._most,
            wire.encode({**self._terms, "topology": asdict(self.topology)}),
            *_rows(self.clients, self.bench, self.public),
            self.device.type == "cuda",
        )

    def close(self) -> None:
        super().close()
        if self._ours:
            import ray

            ray.shutdown()
            self._ours = False


def simulate_at(address: str) -> MakeSimulation:
    """For `Experiment.build`: simulate on the Ray cluster at this address; "" starts one on this machine."""
    return lambda experiment, clients, facts, options: RayCluster(
        clients, experiment, address=address, facts=facts, **options
    )


def connect(address: str) -> bool:
    """Take part in this cluster, or make one; whether it is ours to leave."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage reports
    try:
        import ray
    except ImportError:
        raise Mistake(
            "Ray is not installed here: install kilter with its ray extra (pip install 'kilter[ray]')."
        ) from None
    if ray.is_initialized():
        return False
    host, _, port = address.rpartition(":")
    options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        if port.isdigit() and "/" not in host:  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), 10).close()
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as e:  # of whatever kind Ray gives: there is no cluster
        where = f"at '{address}'" if address else "on this machine"
        raise Mistake(
            f"No Ray cluster answers {where} ({str(e).splitlines()[0]}): start one with `ray start --head`."
        ) from None
    return True


class Seats:
    """The cluster's processors that work for us, each a process with the rows and the method; the pool of a `RayCluster`."""

    def __init__(
        self, most: int | None, terms: bytes, rows: bytes, tables: Sequence[np.ndarray], gpu: bool = False
    ) -> None:
        import ray

        self._ray: Any = ray
        self._most = most
        self._terms = [ray.put(_array(terms)), ray.put(_array(rows)), *(ray.put(t) for t in tables)]
        self._gpu = gpu
        self._kind = ray.remote(num_cpus=1, num_gpus=GPU_SHARE if gpu else 0, max_restarts=0)(Seat)
        self._idle: list[Handle] = []
        self._busy: dict[Handle, tuple[Handle, list[str]]] = {}  # an answer to come: who gives it, about whom
        self._coming: dict[Handle, Handle] = {}  # who is getting ready
        self._call = 0

    def _invite(self) -> None:
        """As many as there are processors, and shares of GPUs where these are used; also on machines that joined since."""
        resources = self._ray.cluster_resources()
        there = int(resources.get("CPU", 0))
        if self._gpu:
            there = min(there, int(resources.get("GPU", 0) / GPU_SHARE))
        wanted = there if self._most is None else min(self._most, there)
        for _ in range(wanted - len(self._idle) - len(self._busy) - len(self._coming)):
            self._ask(self._kind.remote())

    def _ask(self, seat: Handle) -> None:
        """Whether it is ready: it is one of us when it answers."""
        self._coming[seat.prepare.remote(*self._terms)] = seat

    def run(
        self,
        name: str,
        round: int,
        chunks: Sequence[Sequence[str]],
        messages: Mapping[str, Tree],
        states: Mapping[str, State],
        split: WorkSplit | None = None,
    ) -> Iterator[tuple[str, Done, State | None]]:
        """Perform a step at these nodes, chunk by chunk, wherever a seat is free; what is lost, again elsewhere."""
        ray = self._ray
        self._call += 1
        common = len({id(m) for m in messages.values()}) == 1
        broadcast = ray.put(_array(wire.encode(next(iter(messages.values()))))) if common else None
        waiting = [list(chunk) for chunk in chunks]
        losses: dict[str, int] = {}
        self._invite()
        heard = time.monotonic()
        while waiting or self._busy:
            while waiting and self._idle:
                seat, chunk = self._idle.pop(), waiting.pop(0)
                order = {
                    "call": self._call,
                    "step": name,
                    "round": round,
                    "nodes": chunk,
                    "messages": {} if common else {i: messages[i] for i in chunk},
                    "states": {i: states[i] for i in chunk},
                }
                self._busy[seat.run.remote(_array(wire.encode(order)), broadcast)] = seat, chunk
            came, _ = ray.wait([*self._busy, *self._coming], timeout=1.0) if self._busy or self._coming else ([], [])
            heard = time.monotonic() if came or self._busy else heard
            for answer in came:
                content = self._open(answer)
                if answer in self._coming:
                    seat = self._coming.pop(answer)
                    if content is not None:
                        _agree(wire.decode(content))
                        self._idle.append(seat)
                    continue
                seat, chunk = self._busy.pop(answer)
                if content is not None:
                    self._idle.append(seat)
                    yield from decode_outcomes(wire.decode(content))
                    continue
                losses[chunk[0]] = losses.get(chunk[0], 0) + 1
                log.warning("a process of the Ray cluster was lost; what it was doing is done again elsewhere")
                if losses[chunk[0]] == LOSSES:
                    raise Mistake(
                        f"Whatever process of the cluster trained {', '.join(chunk)} was lost, {LOSSES} times: "
                        "perhaps its machine lacks the memory."
                    )
                waiting.insert(0, chunk)
                while self._idle:  # they may be gone with it
                    self._ask(self._idle.pop())
            if not came:
                self._invite()
            if time.monotonic() - heard > PATIENCE:
                raise Mistake("The Ray cluster has no free processor for us: add a machine, then resume the run.")

    def _open(self, answer: Handle) -> bytes | None:
        """What came; None if it was lost with its machine."""
        lost = self._ray.exceptions
        try:
            return bytes(self._ray.get(answer))
        except (lost.RayActorError, lost.ObjectLostError, lost.WorkerCrashedError, lost.OutOfMemoryError):
            return None
        except lost.RayTaskError as e:
            raise Mistake(f"A machine of the Ray cluster cannot take part: {str(e.cause).splitlines()[-1]}") from None

    def close(self) -> None:
        for seat in [*self._idle, *(s for s, _ in self._busy.values()), *self._coming.values()]:
            self._ray.kill(seat)
        self._idle, self._busy, self._coming = [], {}, {}


class Seat:
    """One process on a machine of the cluster. It holds rows and method, and keeps nothing else."""

    def __init__(self) -> None:
        self._fed: Simulation | None = None
        self._heard: tuple[int, Tree] = (0, None)

    def prepare(self, terms: np.ndarray, rows: np.ndarray, *tables: np.ndarray) -> np.ndarray:
        """Take up rows and method, once; what this process runs."""
        if self._fed is None:
            setup = wire.decode(bytes(terms))
            experiment = Experiment.of(tomllib.loads(setup["experiment"]))
            clients, bench, public = _read_rows(bytes(rows), tables)
            fed = Simulation(
                clients,
                bench=bench,
                public=public,
                seed=experiment.seed,
                plain=experiment.plain,
                device=experiment.device.partition(":")[0],  # Ray shows a process its own GPU only
                precision=experiment.precision,
            )
            fed.topology = Topology(**setup["topology"])
            fed.bind(experiment.make(**setup["facts"]))
            self._fed = fed
        return _array(wire.encode(_versions()))

    def run(self, order: np.ndarray, broadcast: np.ndarray | None) -> np.ndarray:
        """Perform a step at some nodes."""
        request = wire.decode(bytes(order))
        nodes = request["nodes"]
        try:
            if broadcast is not None and self._heard[0] != request["call"]:
                self._heard = request["call"], wire.decode(bytes(broadcast))
            messages = request["messages"] or dict.fromkeys(nodes, self._heard[1])
            assert self._fed is not None
            done = self._fed.run_here(request["step"], request["round"], messages, request["states"])
            try:
                return _array(wire.encode(encode_outcomes(done)))
            except Exception:
                return _array(wire.encode(encode_sendable(done)))
        except BaseException as e:
            return _array(wire.encode(encode_failure(nodes, e)))


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)  # which the object store hands on without a copy


def _rows(clients: Mapping[str, Data], bench: Rows | None, public: Rows | None) -> tuple[bytes, list[np.ndarray]]:
    """Who has which rows, as a letter; and the tables, each once."""
    tables: dict[int, Tensor] = {}

    def spec(rows: Rows | None) -> Tree:
        if rows is None:
            return None
        for table in rows.tables.values():
            tables[id(table)] = table
        at = {id_: k for k, id_ in enumerate(tables)}
        return {"tables": {k: at[id(t)] for k, t in rows.tables.items()}, "index": rows.index, "own": dict(rows.own)}

    who = {i: [spec(d.train), spec(d.valid), spec(d.test)] for i, d in clients.items()}
    letter = wire.encode({"clients": who, "bench": spec(bench), "public": spec(public)})
    return letter, [t.numpy() for t in tables.values()]


def _read_rows(letter: bytes, tables: Sequence[np.ndarray]) -> tuple[dict[str, Data], Rows | None, Rows | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nobody may write on them: nobody does
        shared = [torch.from_numpy(t) for t in tables]

    def rows(spec: Tree) -> Rows:
        return Rows({k: shared[at] for k, at in spec["tables"].items()}, spec["index"], spec["own"])

    table = wire.decode(letter)
    clients = {i: Data(*map(rows, parts)) for i, parts in table["clients"].items()}
    bench, public = (rows(table[k]) if table[k] is not None else None for k in ("bench", "public"))
    return clients, bench, public


def _absolute(experiment: Experiment) -> Experiment:
    """With the user's own files by their whole path, under which every machine must have them."""
    specs: dict[str, str] = {"method": experiment.method, "model": experiment.model}
    whole: dict[str, Any] = {k: str(Path(v).absolute()) for k, v in specs.items() if is_file_spec(v)}
    return replace(experiment, **whole)


def _versions() -> dict[str, str]:
    return versions() | {"processor": torch.backends.cpu.get_cpu_capability()}


def _agree(theirs: Mapping[str, str]) -> None:
    """Other versions give other numbers."""
    for what, mine in _versions().items():
        if theirs[what] == mine:
            continue
        if what == "processor":
            log.warning(
                "a machine of the cluster computes with %s and this one with %s: last bits may differ",
                theirs[what],
                mine,
            )
        elif what not in ("python", "cpu"):
            raise Mistake(
                f"A machine of the Ray cluster has {what} {theirs[what]}, this one {mine}: install the same on all."
            )
