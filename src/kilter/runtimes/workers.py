"""Persistent worker processes on this machine. Forked, so data and method are there without being sent.

Orders and answers go through pipes, their tensors through shared memory. A worker that loses its parent ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait

import torch

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.fast.memory_layout import grounded
from kilter.records import wire
from kilter.runtimes.autotune import Share
from kilter.runtimes.shared_memory import Board, Room, Shelf, copied, packed
from kilter.runtimes.step_runner import Done
from kilter.runtimes.worker_messages import Outcome, State, apologies, read, written

Work = Callable[[str, int, Mapping[str, Tree], Mapping[str, State]], dict[str, Outcome]]


class Workers:
    """Steps performed in several processes, chunk by chunk."""

    def __init__(self, count: int, work: Work) -> None:
        if not hasattr(os, "fork"):
            raise Mistake("Several workers need an operating system that can fork: use --workers 1 here.")
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        self._shelves = [Shelf() for _ in range(count)]
        self._orders = [Board() for _ in range(count)]
        self._broadcast = Board()
        for shelf, orders in zip(self._shelves, self._orders, strict=True):
            mine, theirs = context.Pipe()
            others = list(self._pipes)
            boards = orders, self._broadcast
            process = context.Process(target=_serve, args=(theirs, [mine, *others], shelf, boards, work), daemon=True)
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
        share: Share | None = None,
    ) -> Iterator[tuple[str, Done, State | None]]:
        """Perform a step at these nodes, some chunks at a time, wherever one of the workers is free.

        Gives what came of it as it comes.
        """
        count, size = share or Share(len(self._pipes))
        common = len({id(m) for m in messages.values()}) == 1
        # Written once, whatever the number of workers; each reads it when it has its first chunk.
        broadcast = self._broadcast.write(next(iter(messages.values()))) if common else b""
        told: set[int] = set()
        room: dict[int, int | None] = {}  # where each busy worker puts its answer's tensors
        waiting = [chunks[k : k + size] for k in range(0, len(chunks), size)]
        idle, pipes = list(range(len(self._pipes)))[:count], self._pipes[:count]
        while waiting or room:
            while waiting and idle:
                worker, taken = idle.pop(0), [list(chunk) for chunk in waiting.pop(0)]
                nodes = [i for chunk in taken for i in chunk]
                room[worker] = self._shelves[worker].take()
                own = {
                    "messages": {} if common else {i: messages[i] for i in nodes},
                    "states": {i: states[i] for i in nodes},
                }
                order = {
                    "step": name,
                    "round": round,
                    "chunks": taken,
                    "own": self._orders[worker].write(own),
                    "broadcast": broadcast if worker not in told else b"",
                    "room": room[worker],
                }
                told.add(worker)
                self._send(worker, wire.encode(order))
            came = []
            for pipe in wait(pipes):
                worker = pipes.index(pipe)  # type: ignore[arg-type]
                came.append(self._shelves[worker].read(self._receive(worker), room.pop(worker)))
                idle.append(worker)
            while came:
                yield from ((i, d, copied(state)) for answer in came.pop() for i, d, state in read(answer))

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
                f"A worker process died (exit code {code}, often for lack of memory): resume the run, with fewer workers."
            )
        return Mistake(f"A worker process died (exit code {code}): resume the run; with --workers 1 it would say why.")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, foreign: list[Connection], shelf: Shelf, boards: tuple[Board, Board], work: Work) -> None:
    """A worker's life."""
    for other in foreign:  # the parent's ends, inherited by the fork: with them open nobody would see the parent go
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # the parent hands out orders to all before one of them takes its processor
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    orders, broadcasts = boards
    message: Tree = None
    while True:
        try:
            order = wire.decode(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        room = Room(shelf.room(order["room"]))
        if order["broadcast"]:
            message = broadcasts.read(order["broadcast"])
        own = orders.read(order["own"])
        done: list[dict[str, Outcome]] = []  # of each chunk: what was trained together is in one piece
        for chunk in order["chunks"]:
            messages = {i: own["messages"].get(i, message) for i in chunk}
            try:
                with grounded(room.ground):
                    done.append(work(order["step"], order["round"], messages, own["states"]))
            except BaseException as e:  # whatever it is, the worker lives on
                done.append(dict.fromkeys(chunk, (Done(error=e), None)))
        try:
            answer = packed([written(d) for d in done], room)
        except Exception:  # something that cannot be sent: say so of the nodes it is true of
            answer = packed([apologies(d) for d in done], room)
        try:
            pipe.send_bytes(answer)
        except OSError:  # the parent did not wait for it: it was stopped
            return
