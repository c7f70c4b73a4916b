"""The registry of partition rules, and how `name:arg:arg` is parsed into a call of one."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kilter.errors import Mistake, unknown

Parts = list[NDArray[np.int64]]  # for each client, the positions of its rows
Rng = np.random.Generator | np.random.RandomState
F = TypeVar("F", bound=Callable[..., Parts])

RULES: dict[str, PartitionRule] = {}


@dataclass(frozen=True)
class PartitionRule:
    """A partition rule, and what a split needs to know about it."""

    name: str
    divide: Callable[..., Parts]
    by: str  # "labels" or "groups": what it divides by, which is the name of the function's first parameter
    repeats: bool = False  # several clients may hold the same row
    named: bool = False  # clients are groups and have their names
    noise: bool = False  # noise is added to the clients' features
    public: float = 0.0  # share of the rows the server trains on
    public_test: float = 0.0  # share of the rows the server tests on
    test: float | None = None  # share of a client's rows it tests on, if the rule sets it

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that a user can set, in order."""
        return dict(list(inspect.signature(self.divide).parameters.items())[3:])

    @property
    def signature(self) -> str:
        """How to write the rule: `dirichlet[:alpha=0.5][:least=10]`."""
        return self.name + "".join(f"[:{name}={p.default}]" for name, p in self.parameters.items())


def partition(name: str, **traits: Any) -> Callable[[F], F]:
    """Register a rule under this name; `traits` are fields of PartitionRule."""

    def register(function: F) -> F:
        by = next(iter(inspect.signature(function).parameters))

        @wraps(function)
        def divide(ids: NDArray[np.int64], clients: int, rng: Rng, *args: Any, **kwargs: Any) -> Parts:
            ids = np.asarray(ids)
            if clients < 0 or (clients == 0 and by == "labels"):
                raise Mistake(f"A split needs at least 1 client, not {clients}.")
            if clients > len(ids):
                raise Mistake(f"{clients} clients cannot share {len(ids)} rows: ask for at most {len(ids)} clients.")
            return function(ids, clients, rng, *args, **kwargs)

        RULES[name] = PartitionRule(name, divide, by, **traits)
        return typing.cast(F, divide)

    return register


def parse(spec: str) -> tuple[PartitionRule, dict[str, Any]]:
    """The rule and the arguments of `name:arg:arg`; an argument may be named, as in `noise:is_std=true`.

    >>> import kilter.data.partitions
    >>> rule, arguments = parse("dirichlet:0.1")
    >>> rule.name, arguments
    ('dirichlet', {'alpha': 0.1, 'least': 10})
    """
    name, *texts = spec.strip().split(":")
    if name not in RULES:
        raise unknown("partition", name, RULES)
    rule = RULES[name]
    types = typing.get_type_hints(rule.divide)
    names = list(rule.parameters)
    arguments = {p: parameter.default for p, parameter in rule.parameters.items()}
    for position, text in enumerate(texts):
        key, equals, value = text.partition("=")
        if not equals:
            key, value = (names[position] if position < len(names) else ""), text
        if key not in arguments:
            raise Mistake(f"Partition '{spec}' has one argument too many, '{text}': write {rule.signature}.")
        try:
            arguments[key] = convert(value, types[key])
        except ValueError:
            kind = types[key].__name__
            raise Mistake(
                f"Partition '{spec}': {key} must be of type {kind}, not '{value}': write {rule.signature}."
            ) from None
    return rule, arguments


def convert(text: str, kind: type) -> Any:
    """Parse the value of a parameter."""
    if kind is bool:
        try:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        except KeyError:
            raise ValueError(text) from None
    return kind(text)


def describe() -> Mapping[str, str]:
    """The parameters and the one-line description of each rule, for `kilter partitions`."""
    lines = {name: (inspect.getdoc(rule.divide) or "").splitlines()[0] for name, rule in RULES.items()}
    return MappingProxyType({name: f"{RULES[name].signature}  {line}" for name, line in lines.items()})
