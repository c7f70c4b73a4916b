"""Record a computation once and replay it on other numbers of the same shapes, without Python's overhead.

A step of a small stack is about thirty torch operations, for which Python (modules, `vmap`, autograd) takes longer than the
arithmetic. Every step is the same, so the operations are recorded once and then called one after another. A tape is not used
if a later step could be a different computation: because of random numbers, code that reads a tensor's values, or shapes that
depend on them. Nor is it used if a rehearsal on other numbers does not give the same bits.

A result that is a matrix product, and nothing but a result, is returned as its factors: the caller can add it without
multiplying it out first. That rounds differently, so a tape is used from the first step on: results must not depend on what was
recorded before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kilter.fast.client_random import Arguments, NamedArguments, TorchFunction

Compute = Callable[[Sequence[Tensor]], list[Tensor]]
Tape = Callable[..., list["Tensor | Product"]]

CHANGING = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}  # differ from their argument only for autograd
LOOKS = {Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
KEPT = 256  # tapes


class Product(NamedTuple):
    """The factors of a batched matrix product."""

    left: Tensor
    right: Tensor

    def tensor(self) -> Tensor:
        return torch.bmm(self.left, self.right)


def plain(result: Tensor | Product) -> Tensor:
    """The result as a tensor."""
    return result.tensor() if isinstance(result, Product) else result


class CannotRecord(Exception):
    """Why a computation cannot be recorded."""


def factors(result: Tensor | Product) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, Product) else ()


class Tapes:
    """Recently recorded computations, by key."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, Tape | None] = OrderedDict()

    def run(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Sequence[Tensor | Product]:
        """compute(inputs), replayed from a tape if possible."""
        if key not in self._seen:
            results, self._seen[key] = recorded(compute, inputs)
            if len(self._seen) > KEPT:
                self._seen.popitem(last=False)
            return results
        self._seen.move_to_end(key)
        tape = self._seen[key]
        return compute(inputs) if tape is None else played(tape, inputs)


def recorded(compute: Compute, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor | Product], Tape | None]:
    """compute(inputs), and its tape (a function of the inputs) if the computation can be recorded."""
    copies = [t.clone() for t in inputs]
    if any(t.stride() != c.stride() for t, c in zip(inputs, copies, strict=True)):  # overlapping memory
        return compute(inputs), None
    with Recorder(copies) as recorder, _ValueReads(recorder):
        results = compute(copies)
    tape = recorder.tape(results)
    del recorder  # and all it holds
    if tape is not None and rehearsed(tape, compute, inputs):
        return played(tape, inputs), tape
    # Running it again could draw other random numbers, so keep these results and copy back what changed in place.
    for t, c in zip(inputs, copies, strict=True):
        if not torch.equal(t, c):
            t.copy_(c)
    return results, None


def rehearsed(tape: Tape, compute: Compute, inputs: Sequence[Tensor]) -> bool:
    """Whether the tape gives the same bits on other numbers. This exposes values wrongly taken for constants."""
    mine, theirs = ([t * 0.5 if t.is_floating_point() else t.clone() for t in inputs] for _ in range(2))
    expected, results = compute(mine), [plain(r) for r in played(tape, theirs)]
    pairs = zip([*expected, *mine], [*results, *theirs], strict=True)
    return all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)


def played(tape: Tape, inputs: Sequence[Tensor]) -> list[Tensor | Product]:
    with torch._C._AutoDispatchBelowAutograd():
        return tape(*inputs)


class Recorder(TorchDispatchMode):
    """Inside this context, every torch operation is recorded."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}  # of tensors, by identity
        self._places: dict[Hashable, str] = {}  # by memory: autograd may return another view of the same numbers
        self._memory: set[int] = set()
        self._held: list[object] = []  # keeps objects alive, because ids are unique only among live objects
        self._constants: dict[str, object] = {}
        self._lines: list[tuple[list[str], str, list[str], bool]] = []  # results, call, arguments, whether it writes
        self._factors: dict[str, list[str]] = {}  # of products
        self.why: str | None = None  # the computation cannot be recorded
        self._inputs = [self._new(t) for t in inputs]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # opting out would import torch's compiler, which takes 1.6 s

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if self.why is None:
            try:
                self._note(func, args, kwargs or {}, out)
            except CannotRecord as e:
                self.why = str(e)
        return out

    def _note(self, func: OpOverload, args: Arguments, kwargs: NamedArguments, out: object) -> None:
        if CHANGING & set(func.tags):
            raise CannotRecord(f"{func} may be a different computation next time")
        used: list[str] = []
        if func in ALIASES:
            self._names[id(out)] = self._name(args[0])
            self._held.append(out)
            return
        arguments = [self._code(a, used) for a in args] + [f"{k}={self._code(v, used)}" for k, v in kwargs.items()]
        results = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, list | tuple) else None
        if results is None or not all(r is None or isinstance(r, Tensor) for r in results):
            if out is not None:
                raise CannotRecord(f"{func} gives {type(out).__name__}")
            results = []
        names = ["_" if r is None else self._names.get(id(r)) or self._new(r) for r in results]
        call = f"{self._constant(func._op)}({', '.join(arguments)})"
        target = names[0] if isinstance(out, Tensor) else "".join(f"{n}, " for n in names)
        self._lines.append((names, f"{target} = {call}" if names else call, used, func._schema.is_mutable))
        if func is torch.ops.aten.bmm.default:
            self._factors[names[0]] = used

    def _new(self, t: Tensor) -> str:
        name = f"t{len(self._held)}"
        self._held.append(t)
        self._names[id(t)] = name
        if t.layout == torch.strided and t.numel():
            self._memory.add(t.untyped_storage().data_ptr())
            self._places.setdefault(_place(t), name)
        return name

    def _name(self, t: Tensor) -> str:
        if id(t) in self._names:
            return self._names[id(t)]
        if t.layout != torch.strided or not t.numel():
            raise CannotRecord("a tensor with an unusual layout")
        if t.untyped_storage().data_ptr() not in self._memory:  # created earlier: a constant of the loss
            self._held.append(t)
            return self._constant(t)
        if _place(t) not in self._places:
            raise CannotRecord("a view that was not recorded")
        self._held.append(t)
        self._names[id(t)] = self._places[_place(t)]
        return self._names[id(t)]

    def _constant(self, value: object) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _code(self, value: object, used: list[str]) -> str:
        if isinstance(value, Tensor):
            name = self._name(value)
            used.append(name)
            return name
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._code(v, used) for v in value)}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, Generator):
            raise CannotRecord("random numbers")
        return self._constant(value)

    def tape(self, outputs: Sequence[Tensor]) -> Tape | None:
        """The recorded operations as a function from the inputs to these outputs; None if that is not possible."""
        try:
            results = [self._name(t) for t in outputs]
        except CannotRecord as e:
            self.why = str(e)
        if self.why is not None:
            return None
        elsewhere = Counter([*results, *(n for _, _, used, _ in self._lines for n in used)])
        written = {n for _, _, used, writes in self._lines if writes for n in used}
        returned, wanted = [], set()
        for name in results:
            both = self._factors.get(name, [])
            if both and elsewhere[name] == 1 and not written & set(both):
                returned.append(f"Product({', '.join(both)})")
                wanted |= set(both)
            else:
                returned.append(name)
                wanted.add(name)
        lines = []
        last = wanted | set(self._inputs)
        for names, code, used, writes in reversed(self._lines):
            if not writes and not wanted & set(names):
                continue
            wanted |= set(used)
            ended = [n for n in dict.fromkeys([*used, *names]) if n not in last and n.startswith("t")]
            last |= set(ended)
            lines.append(f"    {code}" + (f"; del {', '.join(ended)}" if ended else ""))
        head = f"def tape({', '.join(self._inputs)}):"
        namespace: dict[str, Any] = {"Product": Product, **self._constants}
        exec("\n".join([head, *reversed(lines), f"    return [{', '.join(returned)}]"]), namespace)
        tape: Tape = namespace["tape"]
        return tape


class _ValueReads(TorchFunctionMode):
    """Inside this context, reading a tensor's values, which is not a torch operation, rules out a tape."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> object:
        if func in LOOKS:
            self._recorder.why = "it reads values"
        return func(*args, **(kwargs or {}))


def _place(t: Tensor) -> Hashable:
    return t.data_ptr(), t.dtype, tuple(t.shape), t.stride()
