"""The nodes' side of every runtime: find a step by its name, run it at nodes, and train the fits they yield.

Steps are found by name because code never travels: a worker, a cluster node and a hospital each have the method already.
`kilter.runtimes.step_names` lists the kinds of steps: the method's, the framework's, and the two halves of `pool` between peers.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isgenerator
from pathlib import Path
from typing import Any

from kilter.blocks.server_optimiser import optimised
from kilter.core import AtNodes, Fit, Method, Node, Note, Params, Post, Replies, Step, Tree, Unread
from kilter.errors import Mistake
from kilter.fast import switch
from kilter.fast.fits import run as run_fits
from kilter.records.types import Metrics
from kilter.records.wire import Facts
from kilter.runtimes import groups
from kilter.runtimes.evaluation import POOL, EvaluationRequest, evaluate_requests, examine, predict_part
from kilter.runtimes.personal_layers import with_personal_layers
from kilter.runtimes.robust import robust
from kilter.runtimes.step_names import ADOPT, EVALUATE, EXCHANGE, FOLLOW, LOOK, RECEIVE, StepKind, StepName

RunningStep = Generator[Any, Tree, Tree]  # yields requests (Fit, Look) and is sent the answers


class Absent(Exception):
    """A node gave no usable reply; the message says why. Runtimes record it and go on. Methods never raise it."""


class WorkerError(RuntimeError):
    """An error of a step in another process: in one line, and with its traceback there."""

    def __init__(self, line: str, text: str) -> None:
        super().__init__(f"a step failed in a worker:\n{text}")
        self.line = line


class StepFailed(Mistake):
    """A step raised an error at every node that ran it: the method is at fault, not one node."""


@dataclass
class Done:
    """What came of a step at one node."""

    kept: Tree | Unread = None  # the reply, or where it lies
    error: BaseException | None = None
    fits: list[tuple[float, int]] = field(default_factory=list)  # (loss, steps)
    seconds: float = 0.0  # of training
    notes: list[Note] = field(default_factory=list)
    seen: Facts | None = None  # of the reply, where it has been looked at

    @property
    def reply(self) -> Tree:
        return self.kept.read() if isinstance(self.kept, Unread) else self.kept

    @reply.setter
    def reply(self, reply: Tree) -> None:
        self.kept = reply


def reason(error: BaseException) -> str:
    """An error in one line: its kind, its message, and where it was raised."""
    if isinstance(error, Absent | Mistake):
        return str(error)
    if isinstance(error, WorkerError):
        return error.line
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def step_failed(step: str, place: str, error: BaseException) -> Mistake:
    """What to raise when a step cannot be run anywhere."""
    if isinstance(error, Mistake):
        return error
    failed = StepFailed(f"The step '{step}' failed at {place}: {reason(error)}.")
    failed.__cause__ = error
    return failed


def resolve(method: Method, name: StepName) -> Step:
    """The step of this name: the method's own or the framework's."""
    if name == EVALUATE:
        return lambda node, message: examine(
            method,
            node,
            _own(node, message["state"]),
            message["full"],
            isinstance(message["state"], AtNodes),
            message.get("seen"),
        )
    if name == LOOK:
        return lambda node, message: _look(method, node, message)
    if name == ADOPT:
        return _adopt
    if name == EXCHANGE:
        return groups.exchange
    if name == FOLLOW:
        return groups.follow
    if name == RECEIVE:
        return lambda node, message: True  # the site writes the models to its folder
    step: Any = getattr(method, name.step, None)
    if not getattr(step, "is_step", False):
        raise Mistake(f"The method '{type(method).__name__}' has no step '{name}'.")
    if name.kind not in (StepKind.GATHER, StepKind.MERGE) and method.task is not None and method.task.personal:
        step = with_personal_layers(method, step)
    if name.kind is StepKind.SPREAD:
        return lambda node, message: _spread(method, step, node, message)
    if name.kind is StepKind.GATHER:
        return lambda node, message: _gather(step, node, message, name.robust)
    if name.kind is StepKind.SUBMIT:
        return lambda node, message: groups.submit(method, step, node, message, _run)
    if name.kind is StepKind.MERGE:
        return lambda node, message: groups.merge(step, node, message, name.robust, _run)
    return step


def _own(node: Node, state: Tree) -> Tree:
    return node.state[POOL] if isinstance(state, AtNodes) else state


def _look(method: Method, node: Node, message: Tree) -> list[Tree]:
    """What the global model says of those parts of the common test set that fall to this node's process."""
    if node.bench is None:
        raise Mistake("Only a simulator's processes can look at a common test set for others: there is none here.")
    return [predict_part(method, message["state"], node.bench, part) for part in message["parts"][node.id]]


def _run(out: Tree) -> RunningStep:
    """A step's outcome, whether it yields requests or returns at once."""
    return (yield from out) if isgenerator(out) else out


def _adopt(node: Node, state: Tree) -> None:
    """Begin from this state (peers)."""
    node.state[POOL] = state


def _spread(method: Method, step: Step, node: Node, message: Tree) -> Generator[Fit, Tree, Post]:
    """Train from my own state and write the outcome to my neighbours and myself."""
    state = node.state[POOL]
    if message["view"] is not None:
        state = getattr(method, message["view"])(state, node.id)
    reply = yield from _run(step(node, state))
    return Post({peer: reply for peer in message["to"] if peer in node.peers or peer == node.id})


def _gather(step: Callable[..., Tree], node: Node, box: dict[str, Tree], rule: str) -> Generator[Fit, Tree, None]:
    """Combine what my neighbours and I wrote into my own next state."""
    if box:
        replies = robust(Replies(box, of=len(node.peers) + 1), rule)
        node.state[POOL] = yield from _run(optimised(step)(node, node.state[POOL], replies))


def run_step(step: Step, nodes: Sequence[Node], messages: Sequence[Tree]) -> list[Done]:
    """Run a step at these nodes side by side. Fits and evaluations that several nodes request at once are computed together."""
    done = [Done() for _ in nodes]
    waiting: dict[int, tuple[RunningStep, Fit | EvaluationRequest]] = {}

    def advance(k: int, running: RunningStep, answer: Tree) -> None:
        try:
            waiting[k] = running, running.send(answer)
        except StopIteration as end:
            done[k].reply = end.value
        except Exception as e:
            done[k].error = e

    for k, (node, message) in enumerate(zip(nodes, messages, strict=True)):
        try:
            advance(k, _run(step(node, message)), None)
        except Exception as e:
            done[k].error = e
    while waiting:
        ready, waiting = waiting, {}
        asked = {k: ask for k, (_, ask) in ready.items()}
        for k, answer in {**_fitted(asked, done), **_evaluated(asked, done)}.items():
            advance(k, ready[k][0], answer)
    for node, d in zip(nodes, done, strict=True):
        d.notes = [*d.notes, *(_plain(node, note) for note in node.notes)]
    return done


def _plain(node: Node, note: Note) -> Note:
    """A note as plain values, which may leave this process."""
    if isinstance(note, dict) and "exhibit" in note:
        from kilter.runtimes.exhibits import plain

        return plain(node, note)
    return note


def _fitted(asked: Mapping[int, Any], done: Sequence[Done]) -> dict[int, Params]:
    """Who asked for a fit, and what was trained."""
    fits = {k: ask for k, ask in asked.items() if not isinstance(ask, EvaluationRequest)}
    if not fits:
        return {}
    began = time.perf_counter()
    results = dict(zip(fits, run_fits(list(fits.values())), strict=True))
    seconds = (time.perf_counter() - began) / len(fits)
    for consequence in switch.take_reports():  # once for the whole batch: at its first node
        done[next(iter(fits))].notes.append({"notice": consequence})
    for k, result in results.items():
        done[k].fits.append((result.loss, result.steps))
        done[k].seconds += seconds
    return {k: result.params for k, result in results.items()}


def _evaluated(asked: Mapping[int, Any], done: Sequence[Done]) -> dict[int, Metrics | None]:
    """Who asked for an evaluation, and the metrics; an error in it counts for all of them."""
    requests = {k: ask for k, ask in asked.items() if isinstance(ask, EvaluationRequest)}
    try:
        return dict(zip(requests, evaluate_requests(list(requests.values())), strict=True))
    except Exception as e:
        for k in requests:
            done[k].error = e
        return {}
