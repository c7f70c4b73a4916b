"""Train many clients as one computation. Methods do not notice: a loss is a function of (params, batch, ctx), so `vmap` can
run it for all clients of a stack at once, and one backward pass gives every client its own gradient.

The fits of a stack differ only in numbers: they have the same loss, plan, names and shapes. Clients may have different numbers
of rows: in every step, clients with batches of equal length go together, and a client that has finished leaves the stack.
Nothing is padded.

Results agree with one-by-one training up to the rounding of float32 sums, which are taken in a different order: about 1e-6 of
the size of the weights after one step. The last bits depend on which clients share a stack, so a runtime composes stacks by who
takes part, never by the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, islice, pairwise

import torch
from torch import Tensor

from kilter.core import Batch, Fit, Loss, Rows, Tree, as_float
from kilter.fast import foreach, placement, switch
from kilter.fast.chunks import width
from kilter.fast.client_random import ClientRandom, Draws
from kilter.fast.layers import Layers, for_all
from kilter.fast.memory_layout import stack_tensors, unstack
from kilter.fast.tape import Product, Tapes, factors, plain
from kilter.train import Fitted, lengths, order, trainable

UNSUPPORTED = ("vmap", "functorch", "batching rule")  # in the message of an error: torch cannot stack this loss
strict = False  # raise unexpected errors instead of falling back; the tests set this


def groups(fits: Sequence[Fit]) -> list[list[int]]:
    """Positions of the fits that train together; every fit is in one group."""
    alike: dict[Hashable, list[int]] = {}
    known: dict[Hashable, list[int]] = {}  # fits often share everything but rows and seed: a shortcut by identity
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
    """Split into as few parts of at most `most` as possible, of nearly equal size, in order."""
    parts = -(-len(group) // most)
    cuts = [len(group) * k // parts for k in range(parts + 1)]
    return [group[a:b] for a, b in pairwise(cuts)]


def kind(fit: Fit) -> Hashable:
    """Fits of one kind differ only in numbers. Bound methods are equal if object and function are the same."""
    columns = [(k, v.shape[1:], v.dtype) for part in (fit.rows.tables, fit.rows.own) for k, v in part.items()]
    return fit.loss, fit.plan, tuple(trainable(fit)), _kind(fit.params), tuple(columns), _kind(fit.ctx)


def _kind(tree: Tree) -> Hashable:
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, Mapping):
        return tuple((k, _kind(v)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(_kind(v) for v in tree)
    return float if isinstance(tree, float) else (type(tree), tree)


def _exactly(tree: Tree) -> Hashable:
    """A tree's structure and plain values, exactly."""
    if isinstance(tree, Mapping):
        return tuple((k, _exactly(v)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(_exactly(v) for v in tree)
    return type(tree), repr(tree)


def run_stack(fits: Sequence[Fit]) -> list[Fitted] | None:
    """Train these fits, all of one kind, as one computation; None if their loss cannot be stacked."""
    if getattr(fits[0].loss, "alone", False) or fits[0].plan.alone:
        return None
    try:
        return _train(fits)
    except torch.OutOfMemoryError:
        raise
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
    """The place of a tensor in a tree: its position among the tensors that differ by client, or among the shared ones."""

    own: bool
    at: int


class _Context:
    """The `ctx` of all clients' losses: one tree, with slots for its tensors."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        self._own: list[Tensor] = []  # (clients, ...)
        self.shared: list[Tensor] = []
        self.tree = self._stacked(trees)
        self._own, self.shared = placement.to_device((self._own, self.shared))
        # Everything but the tensors' numbers: what may change the computation.
        layout = tuple([(t.shape, t.stride(), t.dtype) for t in (*self._own, *self.shared)])
        self.kind = _exactly(self.tree), layout, same(self.shared) if switch.cpu_kernels() else ()

    def _stacked(self, trees: Sequence[Tree]) -> Tree:
        first = trees[0]
        if isinstance(first, Mapping):
            return {k: self._stacked([t[k] for t in trees]) for k in first}
        if isinstance(first, list | tuple):
            return type(first)(self._stacked([t[i] for t in trees]) for i in range(len(first)))
        # By value, not by identity: sharing of objects depends on how messages travelled, and must not change results.
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
        """The tensors that differ by client, for these clients."""
        return [t[a:b] for t in self._own]

    def filled(self, own: Sequence[Tensor], shared: Sequence[Tensor], tree: Tree) -> Tree:
        """The tree with these tensors in its slots."""
        if isinstance(tree, _Slot):
            return own[tree.at] if tree.own else shared[tree.at]
        if isinstance(tree, Mapping):
            return {k: self.filled(own, shared, v) for k, v in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.filled(own, shared, v) for v in tree)
        return tree


def _equal(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal."""
    return all(t is tensors[0] or torch.equal(t, tensors[0]) for t in tensors)


def _for_each(w: Tensor, n: int) -> Tensor:
    """(clients, ...): one for each client, or one expanded to all."""
    return w if len(w) == n else w.expand(n, *w.shape[1:])


def same(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Which tensors share memory. A tape for one tensor in two places is not valid for two tensors."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(t.untyped_storage().data_ptr(), k) for k, t in enumerate(tensors))


class _Schedule:
    """The rows that one client uses in each step, looked up for all steps at once."""

    def __init__(self, fit: Fit, rows: Rows) -> None:
        self.rows = rows
        self.sizes = lengths(len(fit.rows), fit.plan.batch) * fit.plan.epochs
        self.ends = tuple(accumulate(self.sizes))
        self.at = order(fit).to(self.rows.index.device)  # positions in the client's Rows
        self.numbers = self.rows.index.index_select(0, self.at)  # and in the shared tables

    def size(self, t: int) -> int:
        """How many rows step t = 1, 2, ... uses; 0 after the last step."""
        return self.sizes[t - 1] if t <= len(self.sizes) else 0

    def part(self, of: Tensor, t: int) -> Tensor:
        return of[self.ends[t - 1] - self.sizes[t - 1] : self.ends[t - 1]]


def _placed(fits: Sequence[Fit]) -> list[Rows]:
    """The rows of each fit: on the current device if those of all fits go there, otherwise where they are."""
    if placement.on_cpu():
        return [fit.rows for fit in fits]
    there = [rows for fit in fits if (rows := placement.resident(fit.rows)) is not None]
    return there if len(there) == len(fits) else [fit.rows for fit in fits]


def _gather(schedules: Sequence[_Schedule], t: int) -> Batch:
    """The batches of several clients in step t, (clients, rows, ...)."""
    first = schedules[0].rows
    batch: Batch = {}
    numbers = torch.stack([c.part(c.numbers, t) for c in schedules])
    for name, table in first.tables.items():
        if all(c.rows.tables[name] is table for c in schedules):
            # index_select copies whole rows, which is three times as fast as table[numbers]
            rows = table.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)
        else:
            rows = torch.stack([c.rows.tables[name].index_select(0, c.part(c.numbers, t)) for c in schedules])
        batch[name] = as_float(rows)
    for name in first.own:
        batch[name] = torch.stack([c.rows.own[name][c.part(c.at, t)] for c in schedules])
    return batch


class _Step:
    """The losses and gradients of several clients' batches, as a function of tensors only."""

    tapes = Tapes()

    def __init__(
        self,
        loss: Loss,
        params: tuple[str, ...],
        train: list[str],
        columns: tuple[str, ...],
        ctx: _Context,
        randoms: list[ClientRandom],
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        self.loss, self.params, self.train, self.columns = loss, params, train, columns
        self.ctx, self.randoms, self.scale = ctx, randoms, scale

    def __call__(self, params: list[Tensor], batch: list[Tensor], own: list[Tensor]) -> Sequence[Tensor | Product]:
        """The losses of all clients, then the gradients in the order of `train`."""
        inputs = [*params, *batch, *own, *self.ctx.shared]
        if not switch.cpu_kernels():
            return self.compute(inputs)
        shapes = tuple([(t.shape, t.stride(), t.dtype) for t in (*params, *batch)])
        key = self.loss, self.params, tuple(self.train), self.columns, shapes, self.ctx.kind
        return self.tapes.run(key, self.compute, inputs)

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        remaining = iter(inputs)
        params = {k: _for_each(next(remaining).detach(), len(self.randoms)) for k in self.params}
        leaves = [params[k].requires_grad_() for k in self.train]
        private = [*params.values(), *islice(remaining, len(inputs) - len(params) - len(self.ctx.shared))]
        shared = list(remaining)

        def one(me: Tensor, mine: list[Tensor]) -> Tensor:
            with (Layers if switch.cpu_kernels() else Draws)(me, self.randoms), placement.autocast():
                own = iter(mine)
                w = dict(zip(self.params, islice(own, len(self.params)), strict=True))
                rows = dict(zip(self.columns, islice(own, len(self.columns)), strict=True))
                return self.loss(w, rows, self.ctx.filled(list(own), shared, self.ctx.tree))

        losses = for_all(len(self.randoms), one, private)
        # A client's loss depends only on its own parameters: the gradient of the sum holds every client's own gradient.
        raw = torch.autograd.grad(self.scale(losses).sum(), leaves, allow_unused=True)
        grads = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, raw, strict=True)]
        return [losses.detach(), *(g.detach() for g in grads)]


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of neighbours with batches of equal length; finished clients (length 0) are left out."""
    at = 0
    for length, same in groupby(lengths):
        end = at + len(list(same))
        if length:
            yield at, end
        at = end


def _train(fits: Sequence[Fit]) -> list[Fitted]:
    plan, loss = fits[0].plan, fits[0].loss
    # Longest first, so that neighbours have batches of equal length in most steps.
    longest = sorted(range(len(fits)), key=lambda k: -len(fits[k].rows))
    fits = [fits[k] for k in longest]
    schedules = [_Schedule(f, rows) for f, rows in zip(fits, _placed(fits), strict=True)]
    randoms = [ClientRandom(f.seed) for f in fits]
    params = placement.to_device({k: stack_tensors([f.params[k] for f in fits]) for k in fits[0].params})
    names = trainable(fits[0])
    common = _common(fits, names)
    state = plan.begin([params[k] for k in names])
    ctx = _Context([f.ctx for f in fits])
    totals, scale = torch.zeros(len(fits), device=placement.current()), placement.LossScale(len(fits))
    steps = range(1, max(len(c.sizes) for c in schedules) + 1)
    parts_of_steps = [(t, a, b) for t in steps for a, b in _runs([c.size(t) for c in schedules])]
    there = schedules[0].numbers.device == placement.current()
    batches = placement.ahead([partial(_gather, schedules[a:b], t) for t, a, b in parts_of_steps], there)
    for (t, a, b), batch in zip(parts_of_steps, batches, strict=True):
        step = _Step(loss, tuple(params), names, tuple(batch), ctx, randoms[a:b], partial(scale.up, part=slice(a, b)))
        here = {k: v[a:b] for k, v in params.items()}
        start = {k: v[:1] if t == 1 and k in common else v for k, v in here.items()}
        losses, *raw = step(list(start.values()), list(batch.values()), ctx.own(a, b))
        leaves = [here[k] for k in names]
        if scale.active:
            scale.down_([plain(g) for g in raw], slice(a, b))
        if plan.rate is not None:  # plain SGD: add a multiple of the gradient in one operation
            _descend(leaves, raw, -plan.rate)
        else:
            grads = [plain(g) for g in raw]
            if plan.clip:
                _clip(grads, plan.clip)
            plan.update(leaves, grads, [[s[a:b] for s in part] for part in state], t)
        totals[a:b] += plain(losses)
    parts = {k: unstack(v.cpu()) for k, v in params.items()}
    done: list[Fitted] = [None] * len(fits)  # type: ignore[list-item]
    for i, (k, total) in enumerate(zip(longest, totals.cpu().tolist(), strict=True)):
        n = len(schedules[i].sizes)
        done[k] = Fitted({name: part[i] for name, part in parts.items()}, total / max(n, 1), n)
    return done


def _common(fits: Sequence[Fit], names: Sequence[str]) -> set[str]:
    """The weights that all clients start from, for networks of linear layers. (A convolution would copy them for each client.)"""
    if any(v.dim() > 2 for v in fits[0].params.values()):
        return set()
    return {k for k in names if _equal([f.params[k] for f in fits])}


def _descend(weights: Sequence[Tensor], grads: Sequence[Tensor | Product], rate: float) -> None:
    """Add `rate` times the gradient to every weight. Products are added without storing them."""
    if any(isinstance(g, Product) for g in grads):
        own = {w.untyped_storage().data_ptr() for w in weights}
        # A factor may be a weight that is about to change.
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
    """Scale every client's gradient down to this norm if it is larger."""
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    shrink = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(shrink.reshape(-1, *[1] * (g.dim() - 1)))
