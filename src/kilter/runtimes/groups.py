"""Several aggregators, each with its group of nodes (topology aggregators:k): `pool` in four steps.

1. Members train from their state and send the result, with their number of rows, to their aggregator (`submit:train`).
2. Each aggregator combines what its group sent and sends the result to the other aggregators (`merge:combine`).
3. Each aggregator averages the groups' states, weighted by the rows behind them, and sends the mean to its group (`:exchange`).
4. Members start from that state in the next round (`:follow`).

With the same letters, all aggregators compute the same mean, so all nodes have one state. For FedAvg it is the star's, because a
mean of weighted means is the weighted mean. What an aggregator remembers is about its own group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kilter import trees
from kilter.blocks.server_optimiser import optimised
from kilter.core import AtNodes, Fit, Method, Node, Post, Replies, Step, Tree
from kilter.errors import Mistake
from kilter.fast import foreach
from kilter.runtimes.evaluation import POOL
from kilter.runtimes.ledger import refuse_letter
from kilter.runtimes.robust import robust
from kilter.runtimes.step_names import ADOPT, EXCHANGE, FOLLOW, StepKind, StepName

if TYPE_CHECKING:
    from kilter.runtimes.base import Runtime

Run = Callable[[Tree], Generator[Fit, Tree, Tree]]  # runs a step that may yield fits


def pool_in_groups(
    fed: Runtime,
    train: Step,
    combine: Callable[..., Tree],
    state: Tree,
    to: Sequence[str],
    view: Callable[..., Tree] | None,
) -> Tree:
    """One pool: the nodes in `to` train; all aggregators and all members take part in the rest."""
    aggregators = tuple(fed.topology.groups)
    if not isinstance(state, AtNodes):  # first round: every node starts from this state
        fed.call(ADOPT, state, training=False)
    order = {"view": view.__name__ if view else None}
    mail = fed.call(StepName(train.__name__, StepKind.SUBMIT), order, to)
    fed.ledger.exchanges += 1
    mail = fed.call(StepName(combine.__name__, StepKind.MERGE, fed.robust), mail, aggregators)
    fed.call(FOLLOW, fed.call(EXCHANGE, mail, aggregators))
    return AtNodes()


def submit(method: Method, step: Step, node: Node, order: Tree, run: Run) -> Generator[Fit, Tree, Post]:
    """Train from my own state and send the result, and how many rows I have, to my aggregator."""
    state = node.state[POOL]
    if order["view"] is not None:
        state = getattr(method, order["view"])(state, node.id)
    reply = yield from run(step(node, state))
    return Post({node.group[0]: (reply, len(node.data.train))})


def merge(
    step: Callable[..., Tree], node: Node, box: Mapping[str, Tree], rule: str, run: Run
) -> Generator[Fit, Tree, Post]:
    """Combine what my group sent, and send the state and the rows behind it to all aggregators."""
    sent = _with_rows(node, box, node.group)
    if not sent:
        return Post()
    replies = robust(Replies({name: reply for name, (reply, _) in sent.items()}, of=len(node.group)), rule)
    state = yield from run(optimised(step)(node, node.state[POOL], replies))
    rows = sum(rows for _, rows in sent.values())
    return Post(dict.fromkeys(node.aggregators, (state, rows)))


def exchange(node: Node, box: Mapping[str, Tree]) -> Post:
    """Average the groups' states, adopt the mean, and send it to my group. Without any state, mine stays as it is."""
    sent = _with_rows(node, box, node.aggregators)
    if not sent:
        return Post()
    node.state[POOL] = average_states(list(sent.values()))
    return Post(dict.fromkeys(node.group[1:], node.state[POOL]))


def follow(node: Node, box: Mapping[str, Tree]) -> None:
    """Start from the state of my aggregator, if it sent one."""
    if node.group[0] in box:
        node.state[POOL] = box[node.group[0]]


def _with_rows(node: Node, box: Mapping[str, Tree], senders: Sequence[str]) -> dict[str, tuple[Tree, int]]:
    """The letters of these senders, in their order: something, and the number of rows behind it. Others are refused."""
    sent: dict[str, tuple[Tree, int]] = {}
    for name in senders:
        letter = box.get(name)
        if isinstance(letter, list | tuple) and len(letter) == 2 and _is_count(letter[1]):
            sent[name] = letter[0], letter[1]
        elif name in box:
            refuse_letter(node, f"the letter of {name} has no number of rows")
    return sent


def _is_count(rows: object) -> bool:
    return isinstance(rows, int) and not isinstance(rows, bool) and 0 < rows < 2**40


def average_states(states: Sequence[tuple[Tree, int]]) -> Tree:
    """The mean of (state, rows) pairs, weighted by rows. A single state is returned as it is.

    Like `params.average`, this is a running mean; integer tensors are those of the first state. Values other than tensors must
    be the same in all states.

    >>> average_states([({"w": Tensor([1.0])}, 1), ({"w": Tensor([3.0])}, 3)])
    {'w': tensor([2.5000])}
    """
    (first, total), *others = states
    if not others:
        return first
    if len({trees.signature(state) for state, _ in states}) > 1:
        raise _not_averaged("differ in shape")
    plain = [[leaf for _, leaf in trees.leaves(state) if not isinstance(leaf, Tensor)] for state, _ in states]
    if any(values != plain[0] for values in plain):
        raise _not_averaged("differ in values other than tensors")
    mean = _copy(first)
    floats = _floats(mean)
    for state, rows in others if floats else ():
        total += rows
        foreach.lerp_(floats, _floats(state), rows / total)
    return mean


def _floats(tree: Tree) -> list[Tensor]:
    return [t for t in trees.tensors(tree) if t.is_floating_point()]


def _copy(tree: Tree) -> Tree:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_copy, tree))
    return tree


def _not_averaged(why: str) -> Mistake:
    return Mistake(f"The states of the groups {why}, so they cannot be averaged: use the topology star or rotating.")
