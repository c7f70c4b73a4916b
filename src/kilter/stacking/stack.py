"""Many clients trained as one computation. Methods do not know: a loss is a function of (params, batch, ctx), so `vmap` can
run it for all clients of a stack at once, and one backward pass gives everyone's own gradient, whatever the loss is.

A stack takes only fits that differ in numbers: same loss, plan, names, shapes. Clients may have different numbers of rows: in
every step those whose batches are equally long go together, and a client that has finished leaves the stack. Nothing is padded.

Results agree with one-by-one training up to the rounding of float32 sums, which are taken in another order: a difference of
about 1e-6 of the size of the weights after a step, which training then carries on like any other rounding. They depend on who
is in a stack with whom in the last bits, so a runtime composes stacks by who takes part, never by the number of processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from kilter.core import Batch, Fit, Tree, as_float
from kilter.stacking.chance import Dice
from kilter.stacking.layers import Layers, for_all
from kilter.train import Fitted, lengths, order, trainable

ALIGN = 64  # bytes: where torch's tensors begin
LARGE = 1_000_000  # weights; from here on a single client keeps a core busy
WIDTH_CONV, WIDTH_DENSE = 5, 25  # clients in a stack: wide enough to share overhead, small enough for the caches

log = logging.getLogger("kilter")
_told: set[Any] = set()  # losses whose falling back was noted


def width(params: Mapping[str, Tensor]) -> int:
    """How many clients are trained in one stack: many if their steps are small, one if they are large."""
    if sum(v.numel() for v in params.values()) > LARGE:
        return 1
    return WIDTH_CONV if any(v.dim() > 2 for v in params.values()) else WIDTH_DENSE


def compose(rows: Mapping[str, int], most: int) -> list[list[str]]:
    """Nodes (with their numbers of rows) in chunks of at most this many, each a share of the work for some process.

    Longest first, so that a chunk's nodes take nearly equally many steps; none has more than half of all rows if it can be
    helped, so that two processes have work.

    >>> compose({"a": 10, "b": 60, "c": 10, "d": 10, "e": 10}, most=3)
    [['b'], ['a', 'c', 'd'], ['e']]
    """
    chunks: list[list[str]] = []
    half, held = sum(rows.values()) / 2, 0
    for i in sorted(rows, key=lambda i: (-rows[i], i)):
        if not chunks or len(chunks[-1]) == most or held + rows[i] > half:
            chunks.append([])
            held = 0
        chunks[-1].append(i)
        held += rows[i]
    return chunks


def stacks(fits: Sequence[Fit]) -> list[list[int]]:
    """Which fits are trained together: positions, every fit in one stack."""
    alike: dict[Any, list[int]] = {}
    known: dict[Any, list[int]] = {}  # fits often share everything but rows and seed, and then one look is enough
    for k, fit in enumerate(fits):
        of = getattr(fit.loss, "__self__", None), getattr(fit.loss, "__func__", fit.loss)
        shared = (*of, fit.params, *fit.rows.tables.values(), fit.plan, fit.ctx, fit.train)
        same = None if fit.rows.own else tuple(map(id, shared))
        group = known.get(same)
        if group is None:
            group = alike.setdefault(kind(fit), [])
            if same:
                known[same] = group
        group.append(k)
    return [part for group in alike.values() for part in even(group, width(fits[group[0]].params))]


def even(group: list[int], most: int) -> list[list[int]]:
    """In order, in as few parts of at most this many as there can be, none much smaller than another."""
    parts = -(-len(group) // most)
    cuts = [len(group) * k // parts for k in range(parts + 1)]
    return [group[a:b] for a, b in pairwise(cuts)]


def kind(fit: Fit) -> Any:
    """Fits of one kind differ in numbers only. Bound methods are equal if object and function are the same."""
    columns = [(k, v.shape[1:], v.dtype) for part in (fit.rows.tables, fit.rows.own) for k, v in part.items()]
    return fit.loss, fit.plan, tuple(trainable(fit)), _kind(fit.params), tuple(columns), _kind(fit.ctx)


def _kind(tree: Tree) -> Any:
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, Mapping):
        return tuple((k, _kind(v)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(_kind(v) for v in tree)
    return float if isinstance(tree, float) else (type(tree), tree)


def run_stack(fits: Sequence[Fit]) -> list[Fitted] | None:
    """Train these fits, all of one kind, as one computation; None if their loss cannot be stacked."""
    if getattr(fits[0].loss, "alone", False):
        return None
    try:
        return _train(fits)
    except Exception as e:  # whatever it was: if the loss is wrong, training one by one will say so
        name = getattr(fits[0].loss, "__qualname__", repr(fits[0].loss))
        if name not in _told:
            _told.add(name)
            reason = (str(e) or type(e).__name__).splitlines()[0]
            log.warning("%s cannot be stacked, so clients are trained one by one, which is slower (%s)", name, reason)
        return None


@dataclass(frozen=True)
class _Slot:
    """The place of a stacked tensor in a tree."""

    at: int


def _stacked(trees: Sequence[Tree], slots: list[Tensor]) -> Tree:
    """One tree for all: what they share as it is, what differs as slots."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {k: _stacked([t[k] for t in trees], slots) for k in first}
    if isinstance(first, list | tuple):
        return type(first)(_stacked([t[i] for t in trees], slots) for i in range(len(first)))
    # By value, not by identity: who shares an object depends on how messages travelled, and must not show in the results.
    if isinstance(first, Tensor):
        if all(t is first or torch.equal(t, first) for t in trees):
            return first
        slots.append(torch.stack(list(trees)))
    elif isinstance(first, float) and any(t != first for t in trees):
        slots.append(torch.tensor(trees, dtype=torch.get_default_dtype()))
    else:
        return first
    return _Slot(len(slots) - 1)


def _filled(tree: Tree, slots: Sequence[Tensor]) -> Tree:
    if isinstance(tree, _Slot):
        return slots[tree.at]
    if isinstance(tree, Mapping):
        return {k: _filled(v, slots) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(v, slots) for v in tree)
    return tree


class _Course:
    """One client's way through its rows: which of them each step takes. They are looked up for all steps at once."""

    def __init__(self, fit: Fit) -> None:
        self.rows = fit.rows
        self.sizes = lengths(len(fit.rows), fit.plan.batch) * fit.plan.epochs
        self.ends = tuple(accumulate(self.sizes))
        self.at = order(fit)  # positions in its Rows
        self.numbers = fit.rows.index.index_select(0, self.at)  # and in the tables

    def size(self, t: int) -> int:
        """How many rows step t = 1, 2, ... takes; none after the last."""
        return self.sizes[t - 1] if t <= len(self.sizes) else 0

    def part(self, of: Tensor, t: int) -> Tensor:
        return of[self.ends[t - 1] - self.sizes[t - 1] : self.ends[t - 1]]


def _gather(courses: Sequence[_Course], t: int) -> Batch:
    """The batches of several clients in step t, (clients, rows, ...)."""
    first = courses[0].rows
    batch: Batch = {}
    numbers = torch.stack([c.part(c.numbers, t) for c in courses])
    for name, table in first.tables.items():
        if all(c.rows.tables[name] is table for c in courses):
            # index_select copies whole rows, which is three times as fast as table[numbers]
            found = table.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)
        else:
            found = torch.stack([c.rows.tables[name].index_select(0, c.part(c.numbers, t)) for c in courses])
        batch[name] = as_float(found)
    for name in first.own:
        batch[name] = torch.stack([c.rows.own[name][c.part(c.at, t)] for c in courses])
    return batch


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(from, to) of neighbours with equal batches; those who have finished (length 0) are left out."""
    at = 0
    for length, same in groupby(lengths):
        end = at + len(list(same))
        if length:
            yield at, end
        at = end


def _train(fits: Sequence[Fit]) -> list[Fitted]:
    plan, loss = fits[0].plan, fits[0].loss
    # Longest first, equally long ones side by side: neighbours then have equal batches in most steps.
    longest = sorted(range(len(fits)), key=lambda k: -len(fits[k].rows))
    fits = [fits[k] for k in longest]
    courses, dice = [_Course(f) for f in fits], [Dice(f.seed) for f in fits]
    params = {k: torch.stack([f.params[k] for f in fits]) for k in fits[0].params}
    names = trainable(fits[0])
    state = plan.begin([params[k] for k in names])
    slots: list[Tensor] = []
    ctx = _stacked([f.ctx for f in fits], slots)
    totals = torch.zeros(len(fits))

    def one(me: Tensor, mine: list[Tensor]) -> Tensor:
        with Layers(me, chance):
            own = iter(mine)
            w = dict(zip(params, islice(own, len(params)), strict=True))
            rows = dict(zip(batch, islice(own, len(batch)), strict=True))
            return loss(w, rows, _filled(ctx, list(own)))

    for t in range(1, max(len(c.sizes) for c in courses) + 1):
        for a, b in _runs([c.size(t) for c in courses]):
            here = {k: v[a:b].detach() for k, v in params.items()}
            leaves = [here[k].requires_grad_() for k in names]
            batch = _gather(courses[a:b], t)
            chance = dice[a:b]
            losses = for_all(b - a, one, [*here.values(), *batch.values(), *(s[a:b] for s in slots)])
            # Each client's loss is a function of its own parameters alone: the sum's gradient is everyone's own.
            found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            with torch.no_grad():
                grads = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, found, strict=True)]
                if plan.clip:
                    _clip(grads, plan.clip)
                plan.update(leaves, grads, [[s[a:b] for s in part] for part in state], t)
                totals[a:b] += losses.detach()
    # Each begins where torch would have put it, for kernels may round otherwise at another alignment: else it is copied there.
    parts = {
        k: v.unbind() if v[0].numel() * v.itemsize % ALIGN == 0 else [p.clone() for p in v] for k, v in params.items()
    }
    done: list[Fitted] = [None] * len(fits)  # type: ignore[list-item]
    for i, k in enumerate(longest):
        n = len(courses[i].sizes)
        done[k] = Fitted({name: part[i] for name, part in parts.items()}, float(totals[i]) / max(n, 1), n)
    return done


def _clip(grads: list[Tensor], limit: float) -> None:
    """Shrink every client's gradient to this norm if it is longer."""
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    shrink = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(shrink.reshape(-1, *[1] * (g.dim() - 1)))
