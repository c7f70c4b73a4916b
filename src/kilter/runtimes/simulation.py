"""The whole federation on one machine: in this process, or in several worker processes.

Every fit uses one torch thread, so results do not depend on the number of workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypedDict

import torch
from torch import Tensor

from kilter.core import Data, Mail, Method, Post, Rows, Tree
from kilter.errors import Mistake
from kilter.fast.chunks import compose, width
from kilter.fast.memory_layout import keep_memory
from kilter.records import wire
from kilter.runtimes.autotune import AutoTuner, WorkSplit, cores
from kilter.runtimes.base import Runtime, fingerprint, joined
from kilter.runtimes.evaluation import PART, parts
from kilter.runtimes.reply_checks import mismatched, must_match
from kilter.runtimes.reply_spool import ReplySpool
from kilter.runtimes.step_names import ADOPT, EVALUATE, LOOK, StepName
from kilter.runtimes.step_runner import Absent, Done, resolve, run_step, step_failed
from kilter.runtimes.worker_messages import Outcome, State
from kilter.runtimes.workers import Workers
from kilter.seeds import derive

MANY = 100  # clients that one process evaluates at a time, if together they have at most PART rows


@dataclass(frozen=True)
class Missing:
    """A fault rule: a call at a node fails with this probability, drawn from (seed, round, node, step)."""

    probability: float

    def __call__(self, seed: int, round: int, node: str, step: str) -> str | None:
        lost = derive(seed, round, node, step, "missing") < self.probability * 2**63
        return "it did not answer (simulated)" if lost else None


Fault = Callable[[int, int, str, str], str | None]  # (seed, round, node, step) -> a reason, or None


class Pool(Protocol):
    """Processes that run steps, chunk by chunk, and yield results as they arrive."""

    def run(
        self,
        name: str,
        round: int,
        chunks: Sequence[Sequence[str]],
        messages: Mapping[str, Tree],
        states: Mapping[str, State],
        split: WorkSplit | None = None,
    ) -> Iterator[tuple[str, Done, State | None]]: ...

    def close(self) -> None: ...


class SimulationOptions(TypedDict):
    """The keyword arguments of Simulation that an experiment sets."""

    bench: Rows | None
    public: Rows | None
    topology: str
    seed: int
    workers: int | Literal["auto"]
    plain: bool
    device: str
    precision: str
    faults: Fault | None


class Simulation(Runtime):
    """A federation simulated on one machine, for example with the clients of `kilter.data.split(...)`.

    `clients` maps node ids to their data. `bench` is the common test set. `public` holds the rows that the aggregator may use.
    `faults` returns the reason why a call at a node fails, or None. With `workers` > 1, steps run in that many processes;
    "auto" finds the fastest number. Several clients train in one computation (see `kilter.fast`); `stack=False` trains them one by
    one, as real sites do. `plain=True` switches off all accelerated code. `device` is auto, cpu, cuda, cuda:1, mps, xpu, or
    several of one kind with commas, which the workers share; `precision` is fp32, tf32, bf16 or fp16.
    """

    def __init__(
        self,
        clients: Mapping[str, Data],
        *,
        bench: Rows | None = None,
        public: Rows | None = None,
        topology: str = "star",
        seed: int = 0,
        workers: int | Literal["auto"] = 1,
        faults: Fault | None = None,
        stack: bool = True,
        plain: bool = False,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        if not clients:
            raise Mistake("A federation needs at least one client.")
        for name, data in clients.items():
            if not len(data.train):
                raise Mistake(f"Client '{name}' has no training rows: use fewer clients or another partition.")
        most = (cores() if hasattr(os, "fork") else 1) if workers == "auto" else workers
        if most < 1:
            raise Mistake(f"There must be at least one worker, not {workers}.")
        super().__init__(tuple(clients), seed, topology, bench, public)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.plain = plain
        self.set_device(device, precision)
        if not plain:
            keep_memory()
        self.clients = dict(clients)
        self.faults = faults
        self.workers = min(most, len(self.ids))
        self._auto = workers == "auto"
        self._tuner: AutoTuner | None = None
        self.stack = stack and not plain
        self._examined = 1  # clients that are evaluated together
        self._method: Method | None = None
        self._pool: Pool | None = None

    def bind(self, method: Method) -> None:
        super().bind(method)
        self._end_workers()
        self._method = method
        with self.computing():
            self.stack_width = width(method.task.init(self.seed)) if self.stack and method.task else 1
        if self.stack:
            rows = sum(len(d.test) + len(d.valid) for d in self.clients.values())
            self._examined = max(self.stack_width, min(MANY, PART * len(self.clients) // max(rows, 1)))
        self._pool = self.start_workers()
        self._tuner = (
            AutoTuner(self.workers, 1 if self._auto else self.workers)
            if self.workers > 1 and self.device.type == "cpu"
            else None
        )

    def start_workers(self) -> Pool | None:
        """The processes that run steps; None: this process does."""
        return Workers(self.workers, self.run_here, self._take_device) if self.workers > 1 else None

    def _take_device(self, worker: int) -> None:
        """Workers share the devices."""
        self.device = self.devices[worker % len(self.devices)]

    def run_here(
        self, name: str, round: int, messages: Mapping[str, Tree], states: Mapping[str, State]
    ) -> dict[str, Outcome]:
        """Run the named step at these nodes in this process: results, and states where they changed."""
        assert self._method is not None
        step = StepName.parse(name)
        nodes = [self.node(i, step, round, states[i]) for i in messages]
        before = [fingerprint(n.state) for n in nodes]
        with self.computing():
            done = run_step(resolve(self._method, step), nodes, list(messages.values()))
        with suppress(TypeError):  # a reply that cannot be sent is reported when it is sent
            for d, seen in zip(done, wire.facts_each([d.reply for d in done]), strict=True):
                d.seen = seen
        return {
            n.id: (d, None if fingerprint(n.state) == old else n.state)
            for n, d, old in zip(nodes, done, before, strict=True)
        }

    def _run_in_process(
        self,
        name: str,
        round: int,
        chunks: Sequence[Sequence[str]],
        messages: Mapping[str, Tree],
        states: Mapping[str, State],
    ) -> Iterator[tuple[str, Done, State | None]]:
        """Run chunk by chunk in this process."""
        for chunk in chunks:
            for i, (done, state) in self.run_here(name, round, {i: messages[i] for i in chunk}, states).items():
                yield i, done, state

    def _distribute(
        self,
        step: StepName,
        chunks: Sequence[Sequence[str]],
        messages: Mapping[str, Tree],
        states: Mapping[str, State],
    ) -> Iterator[tuple[str, Done, State | None]]:
        """Run chunks in as many processes as are fastest; this process alone is one of the choices."""
        name = str(step)
        split = self._tuner.choose(name, len(chunks)) if self._tuner else None
        if self._pool is None or split:  # a cluster uses whatever is free
            self.shared[name] = min(split.workers, len(chunks)) if split else 1
        began, work = time.perf_counter(), 0
        if self._pool is None or (split and split.workers == 1):
            answers = self._run_in_process(name, self.round, chunks, messages, states)
        else:
            answers = self._pool.run(name, self.round, chunks, messages, states, split)
        for i, d, state in answers:
            work += sum(steps for _, steps in d.fits) or 1
            yield i, d, state
        if self._tuner and split:
            self._tuner.record(name, split, time.perf_counter() - began, work)

    def absence(self, node: str, step: str) -> str | None:
        return self.faults(self.seed, self.round, node, step) if self.faults else None

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        done: dict[str, Done] = {}
        present: dict[str, Tree] = {}
        for i, message in messages.items():
            reason = None if name in (EVALUATE, ADOPT) else self.absence(i, str(name))
            if reason:
                done[i] = Done(error=Absent(reason))
            else:
                present[i] = message
        states = {i: self.states.get(i, {}) for i in present}
        # Chunks do not depend on the number of workers, so neither do the results.
        most = self._examined if name == EVALUATE else self.stack_width
        chunks = compose({i: len(self.clients[i].train) for i in present}, most)
        spool = ReplySpool()
        for i, d, state in self._distribute(name, chunks, present, states):
            d.kept = spool.put(d.kept, d.seen.size if d.seen else None)
            done[i] = d
            if state is not None:
                self.states[i] = state
                self.changed.add(i)
        # One client's error is that client's failure; an error at every client is the method's. The first in order
        # is raised, after all have answered: the same error for any number of workers.
        errors = [error for i in present if (error := done[i].error) is not None]
        if errors and len(errors) == len(present):
            raise step_failed(str(name), "every client", errors[0])
        return done

    def look(self, method: Method, state: Tree) -> Tensor | None:
        """Every process computes parts of it. Nodes only lend their names: this is not traffic."""
        assert self.bench is not None
        count = parts(self.bench)
        mine = {i: list(range(k, count, len(self.ids))) for k, i in enumerate(self.ids[:count])}
        message = {"state": state, "parts": mine}
        nothing: dict[str, State] = {i: {} for i in mine}
        answers = self._distribute(LOOK, [[i] for i in mine], dict.fromkeys(mine, message), nothing)
        done = {i: d for i, d, _ in answers}
        outputs: dict[int, Tensor | None] = {}
        for i, own in mine.items():
            if (error := done[i].error) is not None:
                raise step_failed(str(LOOK), "the common test set", error)
            outputs |= zip(own, done[i].reply, strict=True)
        return joined(outputs[k] for k in range(count))

    def deliver(self, posts: Mapping[str, Post], name: StepName) -> Mail:
        """As on a network, every node checks the letters to be pooled before it reads them."""
        mail = super().deliver(posts, name)
        assert self._method is not None
        if not must_match(self._method, name):
            return mail
        seen: dict[int, wire.Facts] = {}  # a letter sent to all is checked once
        boxes: dict[str, dict[str, Tree]] = {}
        for me in self.ids:
            boxes[me] = dict(mail.box(me))
            for letter in boxes[me].values():
                seen[id(letter)] = seen.get(id(letter)) or wire.facts(letter)
            for sender, why in mismatched({i: seen[id(letter)] for i, letter in boxes[me].items()}, me).items():
                self.ledger.refused_letter(me, str(name), why)
                del boxes[me][sender]
        return Mail(boxes)

    def close(self) -> None:
        """End the worker processes, and give torch its threads back."""
        self._end_workers()
        torch.set_num_threads(self._threads)

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
