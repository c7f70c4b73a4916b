"""Many clients trained as one computation. Methods do not know: a loss is a function of (params, batch, ctx), so `vmap` can
run it for all clients of a stack at once, and one backward pass gives everyone's own gradient, whatever the loss is.

A stack takes only fits that differ in numbers: same loss, plan, names, shapes. Clients may have different numbers of rows: in
every step those whose batches are equally long go together, and a client that has finished leaves the stack. Nothing is padded.

Results agree with one-by-one training up to the rounding of float32 sums, which are taken in another order: a difference of
about 1e-6 of the size of the weights after a step, which training then carries on like any other rounding. They depend on who
is in a stack with whom in the last bits, so a runtime composes stacks by who takes part, never by the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from kilter.core import Batch, Fit, Loss, Tree, as_float
from kilter.fast import foreach, switch
from kilter.fast.chunks import width
from kilter.fast.client_random import Dice
from kilter.fast.layers import Layers, for_all
from kilter.fast.memory_layout import stack_tensors, unstack
from kilter.fast.tape import Product, Tapes, factors, plain
from kilter.train import Fitted, lengths, order, trainable

UNSUPPORTED = ("vmap", "functorch", "batching rule")  # in the message of an error: torch cannot stack this loss
strict = False  # raise unexpected errors instead of falling back; the tests set this


def groups(fits: Sequence[Fit]) -> list[list[int]]:
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


def _exactly(tree: Tree) -> Any:
    """A tree's structure and plain values, to the bit."""
    if isinstance(tree, Mapping):
        return tuple((k, _exactly(v)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(_exactly(v) for v in tree)
    return type(tree), repr(tree)


def run_stack(fits: Sequence[Fit]) -> list[Fitted] | None:
    """Train these fits, all of one kind, as one computation; None if their loss cannot be stacked."""
    if getattr(fits[0].loss, "alone", False):
        return None
    try:
        return _train(fits)
    except Exception as error:  # if the loss itself is wrong, training one by one will raise the same error
        expected = isinstance(error, NotImplementedError) or any(word in str(error) for word in UNSUPPORTED)
        if strict and not expected:
            raise
        name = getattr(fits[0].loss, "__qualname__", repr(fits[0].loss))
        reason = (str(error) or type(error).__name__).splitlines()[0]
        switch.report_once(
            f"{name} cannot be stacked, so clients train one by one", f"{type(error).__name__}: {reason}"
        )
        return None


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a tree: which of those that differ by client, or of those they share."""

    own: bool
    at: int


class _Context:
    """What the clients' losses are given beside parameters and rows: one tree for all, tensors by their places."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        self._own: list[Tensor] = []  # (clients, ...)
        self.shared: list[Tensor] = []
        self.tree = self._stacked(trees)
        # All of it but the tensors' numbers: what a loss may make another computation of.
        layout = tuple([(t.shape, t.stride(), t.dtype) for t in (*self._own, *self.shared)])
        self.kind = _exactly(self.tree), layout, same(self.shared)

    def _stacked(self, trees: Sequence[Tree]) -> Tree:
        first = trees[0]
        if isinstance(first, Mapping):
            return {k: self._stacked([t[k] for t in trees]) for k in first}
        if isinstance(first, list | tuple):
            return type(first)(self._stacked([t[i] for t in trees]) for i in range(len(first)))
        # By value, not by identity: who shares an object depends on how messages travelled, and must not show in the results.
        if isinstance(first, Tensor):
            if _equal(trees):
                return self._put(False, self.shared, first)
            return self._put(True, self._own, torch.stack(list(trees)))
        if isinstance(first, float) and any(t != first for t in trees):
            return self._put(True, self._own, torch.tensor(trees, dtype=torch.get_default_dtype()))
        return first

    @staticmethod
    def _put(own: bool, among: list[Tensor], t: Tensor) -> _Slot:
        among.append(t)
        return _Slot(own, len(among) - 1)

    def own(self, a: int, b: int) -> list[Tensor]:
        """What differs by client, of these clients."""
        return [t[a:b] for t in self._own]

    def filled(self, own: Sequence[Tensor], shared: Sequence[Tensor], tree: Tree) -> Tree:
        """The tree with these tensors in their places."""
        if isinstance(tree, _Slot):
            return own[tree.at] if tree.own else shared[tree.at]
        if isinstance(tree, Mapping):
            return {k: self.filled(own, shared, v) for k, v in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.filled(own, shared, v) for v in tree)
        return tree


def _equal(tensors: Sequence[Tensor]) -> bool:
    """Whether these are one in their numbers."""
    return all(t is tensors[0] or torch.equal(t, tensors[0]) for t in tensors)


def _for_each(w: Tensor, n: int) -> Tensor:
    """(clients, ...) of what each has its own of, or all have one of."""
    return w if len(w) == n else w.expand(n, *w.shape[1:])


def same(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Which of these are in one memory: a tape of one tensor in two places is none of two tensors."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(t.untyped_storage().data_ptr(), k) for k, t in enumerate(tensors))


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


class _Step:
    """The losses of several clients' batches and their gradients, as a function of tensors alone."""

    tapes = Tapes()

    def __init__(
        self,
        loss: Loss,
        params: tuple[str, ...],
        train: list[str],
        columns: tuple[str, ...],
        ctx: _Context,
        dice: list[Dice],
    ) -> None:
        self.loss, self.params, self.train, self.columns = loss, params, train, columns
        self.ctx, self.dice = ctx, dice

    def __call__(self, params: list[Tensor], batch: list[Tensor], own: list[Tensor]) -> Sequence[Tensor | Product]:
        """Every client's loss, then the gradients by name."""
        inputs = [*params, *batch, *own, *self.ctx.shared]
        shapes = tuple([(t.shape, t.stride(), t.dtype) for t in (*params, *batch)])
        key = self.loss, self.params, tuple(self.train), self.columns, shapes, self.ctx.kind
        return self.tapes.run(key, self.compute, inputs)

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = iter(inputs)
        params = {k: _for_each(next(given).detach(), len(self.dice)) for k in self.params}
        leaves = [params[k].requires_grad_() for k in self.train]
        private = [*params.values(), *islice(given, len(inputs) - len(params) - len(self.ctx.shared))]
        shared = list(given)

        def one(me: Tensor, mine: list[Tensor]) -> Tensor:
            with Layers(me, self.dice):
                own = iter(mine)
                w = dict(zip(self.params, islice(own, len(self.params)), strict=True))
                rows = dict(zip(self.columns, islice(own, len(self.columns)), strict=True))
                return self.loss(w, rows, self.ctx.filled(list(own), shared, self.ctx.tree))

        losses = for_all(len(self.dice), one, private)
        # Each client's loss is a function of its own parameters alone: the sum's gradient is everyone's own.
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        grads = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, found, strict=True)]
        return [losses.detach(), *(g.detach() for g in grads)]


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
    params = {k: stack_tensors([f.params[k] for f in fits]) for k in fits[0].params}
    names = trainable(fits[0])
    common = _common(fits, names)
    state = plan.begin([params[k] for k in names])
    ctx = _Context([f.ctx for f in fits])
    totals = torch.zeros(len(fits))
    for t in range(1, max(len(c.sizes) for c in courses) + 1):
        for a, b in _runs([c.size(t) for c in courses]):
            batch = _gather(courses[a:b], t)
            step = _Step(loss, tuple(params), names, tuple(batch), ctx, dice[a:b])
            here = {k: v[a:b] for k, v in params.items()}
            begun = {k: v[:1] if t == 1 and k in common else v for k, v in here.items()}
            losses, *found = step(list(begun.values()), list(batch.values()), ctx.own(a, b))
            leaves = [here[k] for k in names]
            if plan.rate is not None:  # the new weights are the old ones and a multiple of the gradient: in one go
                _descend(leaves, found, -plan.rate)
            else:
                grads = [plain(g) for g in found]
                if plan.clip:
                    _clip(grads, plan.clip)
                plan.update(leaves, grads, [[s[a:b] for s in part] for part in state], t)
            totals[a:b] += plain(losses)
    parts = {k: unstack(v) for k, v in params.items()}
    done: list[Fitted] = [None] * len(fits)  # type: ignore[list-item]
    for i, (k, total) in enumerate(zip(longest, totals.tolist(), strict=True)):
        n = len(courses[i].sizes)
        done[k] = Fitted({name: part[i] for name, part in parts.items()}, total / max(n, 1), n)
    return done


def _common(fits: Sequence[Fit], names: Sequence[str]) -> set[str]:
    """The weights with which all begin, if there are linear layers only: a convolution would copy them for each client."""
    if any(v.dim() > 2 for v in fits[0].params.values()):
        return set()
    return {k for k in names if _equal([f.params[k] for f in fits])}


def _descend(weights: Sequence[Tensor], grads: Sequence[Tensor | Product], rate: float) -> None:
    """Every weight and `rate` times its gradient; products are added as they are multiplied out, half the way of memory."""
    own = {w.untyped_storage().data_ptr() for w in weights}
    # A factor may be a weight itself, which is about to change.
    grads = [plain(g) if own & {f.untyped_storage().data_ptr() for f in factors(g)} else g for g in grads]
    rest = []
    for w, g in zip(weights, grads, strict=True):
        if isinstance(g, Product):
            w.baddbmm_(g.left, g.right, alpha=rate)
        else:
            rest.append((w, g))
    if rest:
        foreach.add_([w for w, _ in rest], [g for _, g in rest], alpha=rate)


def _clip(grads: list[Tensor], limit: float) -> None:
    """Shrink every client's gradient to this norm if it is longer."""
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    shrink = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(shrink.reshape(-1, *[1] * (g.dim() - 1)))
