"""Persistent worker processes on this machine. They are forked, so they have data and method without being sent them.

Requests and answers go through pipes, their tensors through shared memory. A worker whose parent is gone ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait

import torch

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.fast.memory_layout import allocate_stacks_with
from kilter.records import wire
from kilter.runtimes.autotune import WorkSplit
from kilter.runtimes.shared_memory import SharedFile, SharedSlots, SlotWriter, copy_tensors, pack_shared
from kilter.runtimes.step_runner import Done
from kilter.runtimes.worker_messages import Outcome, State, decode_outcomes, encode_outcomes, encode_sendable

Work = Callable[[str, int, Mapping[str, Tree], Mapping[str, State]], dict[str, Outcome]]


class Workers:
    """Runs steps in several processes, chunk by chunk."""

    def __init__(self, count: int, work: Work, prepare: Callable[[int], None]) -> None:
        if not hasattr(os, "fork"):
            raise Mistake(
                "More than one worker needs an operating system with fork (Linux or macOS): use --workers 1 here."
            )
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        self._slots = [SharedSlots() for _ in range(count)]
        self._requests = [SharedFile() for _ in range(count)]
        self._broadcast = SharedFile()
        for number, (slots, requests) in enumerate(zip(self._slots, self._requests, strict=True)):
            mine, theirs = context.Pipe()
            others = list(self._pipes)
            files = requests, self._broadcast
            process = context.Process(
                target=_serve, args=(theirs, [mine, *others], slots, files, work, partial(prepare, number)), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(
        self,
        name: str,
        round: int,
        chunks: Sequence[Sequence[str]],
        messages: Mapping[str, Tree],
        states: Mapping[str, State],
        split: WorkSplit | None = None,
    ) -> Iterator[tuple[str, Done, State | None]]:
        """Run a step at these nodes, some chunks at a time, on whichever worker is free. Yields results as they arrive."""
        count, size = split or WorkSplit(len(self._pipes))
        common = len({id(m) for m in messages.values()}) == 1
        # Written once for all workers; each reads it with its first chunk.
        broadcast = self._broadcast.write(next(iter(messages.values()))) if common else b""
        informed: set[int] = set()  # workers that have the broadcast
        slot: dict[int, int | None] = {}  # where each busy worker puts the tensors of its answer
        waiting = [chunks[k : k + size] for k in range(0, len(chunks), size)]
        idle, pipes = list(range(len(self._pipes)))[:count], self._pipes[:count]
        while waiting or slot:
            while waiting and idle:
                worker, taken = idle.pop(0), [list(chunk) for chunk in waiting.pop(0)]
                nodes = [i for chunk in taken for i in chunk]
                slot[worker] = self._slots[worker].take()
                own = {
                    "messages": {} if common else {i: messages[i] for i in nodes},
                    "states": {i: states[i] for i in nodes},
                }
                request = {
                    "step": name,
                    "round": round,
                    "chunks": taken,
                    "own": self._requests[worker].write(own),
                    "broadcast": broadcast if worker not in informed else b"",
                    "room": slot[worker],
                }
                informed.add(worker)
                self._send(worker, wire.encode(request))
            answers = []
            for pipe in wait(pipes):
                worker = pipes.index(pipe)  # type: ignore[arg-type]
                answers.append(self._slots[worker].read(self._receive(worker), slot.pop(worker)))
                idle.append(worker)
            while answers:
                yield from (
                    (i, d, copy_tensors(state)) for answer in answers.pop() for i, d, state in decode_outcomes(answer)
                )

    def _send(self, worker: int, data: bytes) -> None:
        try:
            self._pipes[worker].send_bytes(data)
        except OSError:
            raise self._died(worker) from None

    def _receive(self, worker: int) -> bytes:
        try:
            return self._pipes[worker].recv_bytes()
        except (EOFError, OSError):
            raise self._died(worker) from None

    def _died(self, worker: int) -> Mistake:
        process = self._processes[worker]
        process.join(5)
        code = process.exitcode
        if code == -signal.SIGKILL:
            return Mistake(
                f"A worker process died (exit code {code}, often out of memory): resume the run with fewer workers."
            )
        return Mistake(f"A worker process died (exit code {code}): resume the run. Use --workers 1 to see the cause.")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(
    pipe: Connection,
    foreign: list[Connection],
    slots: SharedSlots,
    files: tuple[SharedFile, SharedFile],
    work: Work,
    prepare: Callable[[], None],
) -> None:
    """The main loop of a worker process."""
    # The parent's ends, inherited by the fork: while they are open, nobody notices when the parent is gone.
    for other in foreign:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    prepare()
    if hasattr(os, "SCHED_BATCH"):  # let the parent hand out all requests before a worker takes its processor
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    requests, broadcasts = files
    message: Tree = None
    while True:
        try:
            request = wire.decode(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        writer = SlotWriter(slots.slot(request["room"]))
        if request["broadcast"]:
            message = broadcasts.read(request["broadcast"])
        own = requests.read(request["own"])
        done: list[dict[str, Outcome]] = []  # of each chunk, because clients that trained together are stored together
        for chunk in request["chunks"]:
            messages = {i: own["messages"].get(i, message) for i in chunk}
            try:
                with allocate_stacks_with(writer.empty_tensor):
                    done.append(work(request["step"], request["round"], messages, own["states"]))
            except BaseException as e:  # the worker survives any error
                done.append(dict.fromkeys(chunk, (Done(error=e), None)))
        try:
            answer = pack_shared([encode_outcomes(d) for d in done], writer)
        except Exception:  # something cannot be sent: report the nodes concerned
            answer = pack_shared([encode_sendable(d) for d in done], writer)
        try:
            pipe.send_bytes(answer)
        except OSError:  # the parent has stopped
            return
