"""The nodes' side of every runtime: find a step by its name, run it at nodes, perform the fits they yield.

Steps are found by name because code never travels: a worker, a cluster node and a hospital each have the method already.
Besides the method's own steps there are some that belong to the framework: `:evaluate`, by which nodes examine models; `:look`, by
which a simulator's processes share the common test set; and for peers `:adopt`, by which every node takes up the first state, and
`spread:train` and `gather:combine`, the two halves of `pool` where every node aggregates for itself.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import Any

from kilter import train
from kilter.core import AtNodes, Fit, Method, Node, Note, Post, Replies, Step, Tree, Unread
from kilter.errors import Mistake
from kilter.evaluation import examine, predict_part
from kilter.robust import robust
from kilter.wire import Facts

POOL = "~pool"  # where a peer keeps its own state of `pool`


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


def resolve(method: Method, name: str) -> Step:
    """The step of this name: the method's own or the framework's."""
    kind, _, inner = name.rpartition(":")
    if name == ":evaluate":
        return lambda node, message: examine(
            method,
            node,
            _own(node, message["state"]),
            message["full"],
            isinstance(message["state"], AtNodes),
            message.get("seen"),
        )
    if name == ":look":
        return lambda node, message: _look(method, node, message)
    if name == ":adopt":
        return _adopt
    found: Any = getattr(method, inner, None)
    if not getattr(found, "is_step", False):
        raise Mistake(f"The method '{type(method).__name__}' has no step '{name}'.")
    if kind == "spread":
        return lambda node, message: _spread(method, found, node, message)
    if kind.partition(":")[0] == "gather":
        return lambda node, message: _gather(found, node, message, kind.partition(":")[2])
    return found


def _own(node: Node, state: Tree) -> Tree:
    return node.state[POOL] if isinstance(state, AtNodes) else state


def _look(method: Method, node: Node, message: Tree) -> list[Tree]:
    """What the global model says of those parts of the common test set that fall to this node's process."""
    if node.bench is None:
        raise Mistake("Only a simulator's processes can look at a common test set for others: there is none here.")
    return [predict_part(method, message["state"], node.bench, part) for part in message["parts"][node.id]]


def _run(out: Any) -> Generator[Fit, Any, Any]:
    """A step's outcome, whether it yields fits or returns at once."""
    return (yield from out) if isgenerator(out) else out


def _adopt(node: Node, state: Tree) -> None:
    """Begin from this state (peers)."""
    node.state[POOL] = state


def _spread(method: Method, step: Step, node: Node, message: Tree) -> Generator[Fit, Any, Post]:
    """Train from my own state and write the outcome to my neighbours and myself."""
    state = node.state[POOL]
    if message["view"] is not None:
        state = getattr(method, message["view"])(state, node.id)
    reply = yield from _run(step(node, state))
    return Post({peer: reply for peer in message["to"] if peer in node.peers or peer == node.id})


def _gather(step: Any, node: Node, box: dict[str, Tree], rule: str) -> Generator[Fit, Any, None]:
    """Combine what my neighbours and I wrote into my own next state."""
    if box:
        replies = robust(Replies(box, of=len(node.peers) + 1), rule)
        node.state[POOL] = yield from _run(step(node, node.state[POOL], replies))


def perform(step: Step, nodes: Sequence[Node], messages: Sequence[Tree]) -> list[Done]:
    """Run a step at these nodes side by side; fits that are ready together are performed together."""
    done = [Done() for _ in nodes]
    waiting: dict[int, tuple[Generator[Fit, Any, Any], Fit]] = {}

    def advance(k: int, work: Generator[Fit, Any, Any], answer: Any) -> None:
        try:
            waiting[k] = work, work.send(answer)
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
        began = time.perf_counter()
        results = train.run([fit for _, fit in ready.values()])
        seconds = (time.perf_counter() - began) / len(ready)
        for (k, (work, _)), result in zip(ready.items(), results, strict=True):
            done[k].fits.append((result.loss, result.steps))
            done[k].seconds += seconds
            advance(k, work, result.params)
    for node, d in zip(nodes, done, strict=True):
        d.notes = node.notes
    return done
