"""A data set divided among clients: who trains, validates and tests on which rows of the same tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.core import Data, Rows, as_float
from kilter.data.datasets import Dataset, load
from kilter.data.partitions import noise_std
from kilter.data.rules import Parts, Rule, parse
from kilter.errors import Mistake
from kilter.seeds import numpy_generator

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Clients' rows, the global test rows, and what the aggregator may hold."""

    dataset: Dataset
    clients: dict[str, Data]
    test: Rows
    public: Rows | None
    public_test: Rows | None = None
    partition: str = ""
    repeats: bool = False  # the rule lets clients hold the same rows

    def check(self) -> None:
        """No row is two of learnt, validated and tested on, and none is held twice unless the rule repeats rows.

        Learnt = every client's train, and public. Tested = the global, every client's and the public test.
        """
        size = len(self.dataset.y)
        clients = list(self.clients.values())
        learnt = count(size, [d.train for d in clients] + ([self.public] if self.public else []))
        valid = count(size, [d.valid for d in clients])
        local = count(size, [d.test for d in clients] + ([self.public_test] if self.public_test else []))
        tested = local + count(size, [self.test])
        for name, one, other in (
            ("learnt", learnt, "tested"),
            ("validated", valid, "tested"),
            ("learnt", learnt, "validated"),
        ):
            both = np.flatnonzero(one * (tested if other == "tested" else valid))
            if len(both):
                raise ValueError(f"{len(both)} rows are both {name} and {other} on, such as row {both[0]}")
        if not self.repeats and max(learnt.max(), valid.max()) > 1:
            raise ValueError("a row is with two clients, or with one client twice")
        for id_, data in self.clients.items():
            if len(data.train) == 0:
                raise ValueError(f"client {id_} has no training rows")
            if any(len(np.unique(rows.index.numpy())) < len(rows) for rows in (data.train, data.valid, data.test)):
                raise ValueError(f"client {id_} has a row twice")


def count(size: int, rows: Iterable[Rows]) -> Index:
    """How often each row of the tables occurs."""
    total = np.zeros(size, dtype=np.int64)
    for some in rows:
        total += np.bincount(some.index.numpy(), minlength=size)
    return total


def split(
    dataset: Dataset,
    partition: str = "dirichlet:0.5",
    clients: int = 10,
    seed: int = 0,
    *,
    valid: float = 0.1,
    test: float = 0.15,
    public_per_class: int = 0,
) -> Split:
    """Divide the training rows among clients by a partition rule (see PARTITIONS); tables are shared, never copied.

    `public_per_class` rows of each class are set aside first. Of a client's n rows, round(test n) are its test rows,
    then round(valid (n - tests)) its validation, at least one each while a training row remains. Exceptions:
    natural, sources: the test rows of its group in `dataset.test`, where it has any; slfed, whose rows repeat: test
    rows from `dataset.test` in its label proportions, validation rows from one pool that no client trains on;
    fedsbme: 3/7 for test. Natural clients bear their group's name, `clients=0` is all of them; others are c00, c01, ...
    """
    rule, arguments = parse(partition)
    for name, share in (("valid", valid), ("test", test)):
        if not 0 <= share < 1:
            raise Mistake(f"The {name} share must be at least 0 and below 1, not {share:g}.")
    if rule.by == "groups" and dataset.groups is None:
        raise Mistake(
            f"Partition '{rule.name}' needs natural groups and '{dataset.name}' has none: use dirichlet:0.5 or another."
        )
    y = dataset.y.numpy()
    rows, public, public_test = set_aside(dataset, rule, seed, public_per_class)
    groups = y if dataset.groups is None else dataset.groups.numpy()
    ids = groups[rows] if rule.by == "groups" else y[rows]
    parts = rule.divide(ids, clients, numpy_generator(seed, "partition", rule.name), **arguments)
    parts = [rows[part] for part in parts]
    empty = sum(len(part) == 0 for part in parts)
    if empty:
        raise Mistake(f"Partition '{partition}' leaves {empty} of {len(parts)} clients without rows: raise `least`.")
    width = max(2, len(str(len(parts) - 1)))
    names = group_ids(dataset, parts) if rule.named else [f"c{k:0{width}d}" for k in range(len(parts))]
    held = dict(zip(names, parts, strict=True))
    own = rule.test if rule.test is not None else test
    if rule.repeats:
        indices = carve_repeating(dataset, held, seed, valid, own)
    else:
        tests = group_tests(dataset, held, seed) if rule.by == "groups" else {}
        indices = {name: carve(part, seed, name, valid, own, tests.get(name)) for name, part in held.items()}
    x = add_noise(dataset.x, held, seed, **arguments) if rule.noise else dataset.x
    tables = {"x": x, "y": dataset.y}
    whole = Split(
        dataset=replace(dataset, x=x),
        clients={name: Data(*(rows_of(tables, some) for some in three)) for name, three in indices.items()},
        test=Rows(tables, dataset.test),
        public=rows_of(tables, public) if len(public) else None,
        public_test=rows_of(tables, public_test) if len(public_test) else None,
        partition=partition,
        repeats=rule.repeats,
    )
    whole.check()
    return whole


def rows_of(tables: Mapping[str, Tensor], index: Index) -> Rows:
    """These rows in ascending order."""
    return Rows(tables, torch.from_numpy(np.sort(index).astype(np.int64)))


def public_file(path: str, dataset: Dataset) -> Rows:
    """A user's file as public rows: all of it, of the data set's shape and classes, none of them among its rows."""
    found = load(path, classes=dataset.classes)
    mine, theirs = tuple(found.x.shape[1:]), tuple(dataset.x.shape[1:])
    if mine != theirs:
        raise Mistake(f"Rows of the public file '{path}' have shape {mine}, those of '{dataset.name}' {theirs}.")
    held = {digest(dataset.x[i]) for i in torch.cat([dataset.train, dataset.test])}
    both = sum(digest(x) in held for x in found.x)
    if both:
        raise Mistake(
            f"{both} rows of the public file '{path}' are also in '{dataset.name}', where clients train and test on them: "
            "give other rows, or set some aside (--public 10)."
        )
    return Rows.of(x=found.x, y=found.y)


def digest(x: Tensor) -> bytes:
    """Tells rows apart."""
    return blake2b(as_float(x).contiguous().numpy().tobytes(), digest_size=16).digest()


def set_aside(dataset: Dataset, rule: Rule, seed: int, per_class: int) -> tuple[Index, Index, Index]:
    """Training rows for clients, public rows and public test rows, the latter two evenly from every class."""
    if per_class < 0 or (per_class and rule.public):
        raise Mistake(f"public_per_class must be 0 with '{rule.name}' and never negative, not {per_class}.")
    rng = numpy_generator(seed, "public")
    rows, y = dataset.train.numpy(), dataset.y.numpy()
    rest: list[Index] = []
    public: list[Index] = []
    public_test: list[Index] = []
    for c in np.unique(y[rows]):
        mine = rng.permutation(rows[y[rows] == c])
        if per_class >= len(mine):
            raise Mistake(
                f"public_per_class={per_class} takes all {len(mine)} training rows of class '{dataset.classes[c]}': "
                f"ask for at most {len(mine) - 1}."
            )
        first = per_class or round(rule.public * len(mine))
        second = first + round(rule.public_test * len(mine))
        for bin_, some in zip((public, public_test, rest), np.split(mine, [first, second]), strict=True):
            bin_.append(some)
    return np.sort(np.concatenate(rest)), np.concatenate(public), np.concatenate(public_test)


def carve(
    part: Index, seed: int, name: str, valid: float, test: float, own: Index | None
) -> tuple[Index, Index, Index]:
    """A client's train, valid and test rows; `own` are test rows it brings along."""
    part = numpy_generator(seed, "split", name).permutation(part)
    n = len(part)
    tests = 0 if own is not None else some_of(n, test)
    valids = some_of(n - tests, valid)
    return part[tests + valids :], part[tests : tests + valids], part[:tests] if own is None else own


def some_of(n: int, share: float) -> int:
    """round(share n), at least one where the share is not 0, but never all."""
    return min(max(1, round(share * n)), n - 1) if share > 0 else 0


def group_ids(dataset: Dataset, parts: Parts) -> list[str]:
    """Node ids from the names of the clients' groups, in letters, digits, '-', '_' and '.'."""
    assert dataset.groups is not None
    numbers = [int(dataset.groups[part[0]]) for part in parts]
    clean = [re.sub(r"[^A-Za-z0-9_.-]+", "-", dataset.group_names[g]).strip("-") or f"g{g}" for g in numbers]
    return [name if clean.count(name) == 1 else f"{name}-{g}" for name, g in zip(clean, numbers, strict=True)]


def group_tests(dataset: Dataset, held: Mapping[str, Index], seed: int) -> dict[str, Index]:
    """Each group's rows of `dataset.test`, dealt to its clients; all of them to each where they are too few."""
    assert dataset.groups is not None
    groups, rows = dataset.groups.numpy(), dataset.test.numpy()
    members: dict[int, list[str]] = {}
    for name, part in held.items():
        members.setdefault(int(groups[part[0]]), []).append(name)
    tests: dict[str, Index] = {}
    for group, names in members.items():
        mine = numpy_generator(seed, "group test", group).permutation(rows[groups[rows] == group])
        if len(mine) >= len(names):
            tests |= dict(zip(names, np.array_split(mine, len(names)), strict=True))
        elif len(mine):
            tests |= dict.fromkeys(names, mine)
    return tests


def carve_repeating(
    dataset: Dataset, held: Mapping[str, Index], seed: int, valid: float, test: float
) -> dict[str, tuple[Index, Index, Index]]:
    """Rows that repeat: a pool of the rows is for validation wherever they are held; tests come from `dataset.test`.

    Client k's tests: round(s n_kc) rows of class c, s = min(test / (1 - test), min_c available_c / n_kc).
    """
    size, y = len(dataset.y), dataset.y.numpy()
    free = np.setdiff1d(
        np.concatenate(list(held.values())), [part[0] for part in held.values()]
    )  # all keep one to train on
    pool = np.zeros(size, dtype=bool)
    pool[numpy_generator(seed, "valid pool").permutation(free)[: round(valid * len(free))]] = True
    tested = dataset.test.numpy()
    by_class = [tested[y[tested] == c] for c in range(len(dataset.classes))]
    there = np.array([len(rows) for rows in by_class])
    out: dict[str, tuple[Index, Index, Index]] = {}
    for name, part in held.items():
        rng = numpy_generator(seed, "split", name)
        n = np.bincount(y[part], minlength=len(there))
        have = (n > 0) & (there > 0)
        scale = min([test / (1 - test), *(there[have] / n[have])])
        take = np.where(have, np.round(scale * n), 0).astype(int)
        if test > 0 and have.any() and take.sum() == 0:
            take[np.argmax(n * have)] = 1
        tests = np.concatenate([rng.permutation(rows)[:t] for rows, t in zip(by_class, take, strict=True)])
        out[name] = part[~pool[part]], part[pool[part]], tests
    return out


def add_noise(x: Tensor, held: Mapping[str, Index], seed: int, level: float, is_std: bool, **_: Any) -> Tensor:
    """A new table: client k's rows + N(0, noise_std(k)^2), once and for all; images are clipped to 0..1."""
    noisy = x.clone()
    images = x.ndim > 2
    for k, (name, rows) in enumerate(held.items()):
        std = noise_std(k, level, len(held), is_std)
        rng = numpy_generator(seed, "noise", name)
        for some in np.array_split(rows, max(1, len(rows) // 1024)):
            index = torch.from_numpy(some)
            values = as_float(x[index])
            values += std * torch.from_numpy(rng.standard_normal(values.shape, dtype=np.float32))
            values = values.clamp_(0, 1) if images else values
            noisy[index] = (values * 255).round().to(torch.uint8) if x.dtype == torch.uint8 else values
    return noisy
