"""Persistent worker processes on this machine. Forked, so data and method are there without being sent.

Orders and answers go through pipes, the tensors of answers through shared memory. A worker that loses its parent ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from kilter import wire
from kilter.core import Post, Tree
from kilter.errors import Mistake
from kilter.runtimes.host import Done
from kilter.runtimes.parcels import Shelf, copied, packed

Run = Callable[..., dict[str, tuple[Done, dict[str, Tree] | None]]]


class Workers:
    """Steps performed in several processes, chunk by chunk."""

    def __init__(self, count: int, work: Run) -> None:
        if not hasattr(os, "fork"):
            raise Mistake("Several workers need an operating system that can fork: use --workers 1 here.")
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        self._shelves = [Shelf() for _ in range(count)]
        for shelf in self._shelves:
            mine, theirs = context.Pipe()
            others = list(self._pipes)
            process = context.Process(target=_serve, args=(theirs, [mine, *others], shelf, work), daemon=True)
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
        states: Mapping[str, dict[str, Tree]],
    ) -> Iterator[tuple[str, Done, dict[str, Tree] | None]]:
        """Perform a step at these nodes, chunk by chunk, wherever a worker is free; what comes back, as it comes."""
        common = len({id(m) for m in messages.values()}) == 1
        broadcast = wire.encode(next(iter(messages.values()))) if common else b""
        told: set[int] = set()
        room: dict[int, int | None] = {}  # where each busy worker puts its answer's tensors
        waiting = list(chunks)
        idle, busy = list(range(len(self._pipes))), 0
        while waiting or busy:
            while waiting and idle:
                worker, chunk = idle.pop(0), list(waiting.pop(0))
                room[worker] = self._shelves[worker].take()
                order = {
                    "step": name,
                    "round": round,
                    "nodes": chunk,
                    "messages": None if common else {i: messages[i] for i in chunk},
                    "states": {i: states[i] for i in chunk},
                    "broadcast": common and worker not in told,
                    "room": room[worker],
                }
                self._send(worker, wire.encode(order))
                if order["broadcast"]:
                    self._send(worker, broadcast)
                    told.add(worker)
                busy += 1
            for pipe in wait(self._pipes):
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                idle.append(worker)
                busy -= 1
                yield from _read(self._shelves[worker].read(self._receive(worker), room[worker]))

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
        return Mistake(
            f"A worker process died (exit code {process.exitcode}; -9 often means out of memory): "
            "resume the run, with fewer workers."
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, foreign: list[Connection], shelf: Shelf, work: Run) -> None:
    """A worker's life."""
    for other in foreign:  # the parent's ends, inherited by the fork: with them open nobody would see the parent go
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    message: Tree = None
    while True:
        try:
            order = wire.decode(pipe.recv_bytes())
            if order["broadcast"]:
                message = wire.decode(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        messages = order["messages"] or dict.fromkeys(order["nodes"], message)
        room = shelf.room(order["room"])
        try:
            done = work(order["step"], order["round"], messages, order["states"])
            answer = packed({i: _written(d, state) for i, (d, state) in done.items()}, room)
        except Exception as e:
            answer = packed({i: _written(Done(error=e), None) for i in order["nodes"]}, room)
        pipe.send_bytes(answer)


def _written(d: Done, state: dict[str, Tree] | None) -> dict[str, Any]:
    error = None
    if d.error is not None:
        text = str(d.error) if isinstance(d.error, Mistake) else "".join(traceback.format_exception(d.error))
        error = [isinstance(d.error, Mistake), text]
    return {
        "reply": dict(d.reply) if isinstance(d.reply, Post) else d.reply,
        "post": isinstance(d.reply, Post),
        "error": error,
        "fits": d.fits,
        "seconds": d.seconds,
        "notes": d.notes,
        "state": state,
    }


def _read(answer: Mapping[str, Any]) -> Iterator[tuple[str, Done, dict[str, Tree] | None]]:
    for node, a in answer.items():
        error: Exception | None = None
        if a["error"]:
            ours, text = a["error"]
            error = Mistake(text) if ours else RuntimeError(f"a step failed in a worker:\n{text}")
        reply = Post(a["reply"]) if a["post"] else a["reply"]
        fits = [(loss, steps) for loss, steps in a["fits"]]
        # A state stays for long: a copy, so that it does not keep the shared memory from being used again.
        yield node, Done(reply, error, fits, a["seconds"], a["notes"]), copied(a["state"])
