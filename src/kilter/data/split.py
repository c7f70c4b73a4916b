"""A data set divided among clients: the rows that each client trains, validates and tests on. All share the same tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.core import Data, Rows, as_float
from kilter.data.datasets import Dataset, load
from kilter.data.partition_rules import PartitionRule, Parts, parse
from kilter.data.partitions import noise_std
from kilter.data.preparation import Plain, fit
from kilter.errors import Mistake
from kilter.seeds import numpy_generator

Index = NDArray[np.int64]
SKIPPED = "an image could not be read and was skipped"  # a notice in the summary of a run


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of the clients, the global test rows, and the rows of the aggregator."""

    dataset: Dataset
    clients: dict[str, Data]
    test: Rows
    public: Rows | None
    public_test: Rows | None = None
    partition: str = ""
    repeats: bool = False  # several clients may hold the same row
    statistics: Mapping[str, Plain] = field(default_factory=dict)  # of a table: what each client said about its rows

    def skipped(self) -> list[str]:
        """The client of each image that could not be read, or an empty name if it would have been of any client."""
        named = {g: clean_name(g) for g in self.dataset.group_names}
        return [named[g] if named.get(g) in self.clients else "" for g in self.dataset.skipped]

    def check(self) -> None:
        """Check that no row is used for two of training, validation and test, or held twice (unless the rule repeats rows).

        Training rows are those of all clients and the public rows. Test rows are the global, the clients' and the public ones.
        """
        size = len(self.dataset.y)
        clients = list(self.clients.values())
        trained = count(size, [d.train for d in clients] + ([self.public] if self.public else []))
        valid = count(size, [d.valid for d in clients])
        local = count(size, [d.test for d in clients] + ([self.public_test] if self.public_test else []))
        tested = local + count(size, [self.test])
        for name, uses, other in (
            ("trained", trained, "tested"),
            ("validated", valid, "tested"),
            ("trained", trained, "validated"),
        ):
            both = np.flatnonzero(uses * (tested if other == "tested" else valid))
            if len(both):
                raise ValueError(f"{len(both)} rows are both {name} and {other} on, such as row {both[0]}")
        if not self.repeats and max(trained.max(), valid.max()) > 1:
            raise ValueError("two clients hold the same row, or one client holds it twice")
        for id_, data in self.clients.items():
            if len(data.train) == 0:
                raise ValueError(f"client {id_} has no training rows")
            if any((np.diff(np.sort(rows.index.numpy())) == 0).any() for rows in (data.train, data.valid, data.test)):
                raise ValueError(f"client {id_} holds a row twice")


def count(size: int, rows: Iterable[Rows]) -> NDArray[np.int32]:
    """How often each row of the tables occurs."""
    total = np.zeros(size, dtype=np.int32)
    for some in rows:
        total += np.bincount(some.index.numpy(), minlength=size).astype(np.int32)
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
    """Divide the training rows among clients with a partition rule (see PARTITIONS). Tables are shared, never copied.

    `public_per_class` rows of each class are set aside first. Of a client's n rows, round(test n) are test rows, then
    round(valid (n - tests)) are validation rows: at least one each, as long as a training row remains. Exceptions: with natural
    and sources, a client has the test rows of its group in `dataset.test`, if there are any. With slfed, where clients share
    rows, test rows come from `dataset.test` in the client's label proportions, and validation rows from a pool that no client
    trains on. With fedsbme, 3/7 of the rows are test rows. Natural clients have the names of their groups (`clients=0`: all of
    them); other clients are named c00, c01, ...
    """
    for name, share in (("valid", valid), ("test", test)):
        if not 0 <= share < 1:
            raise Mistake(f"The {name} share must be at least 0 and below 1, not {share:g}.")
    whole = _divide(dataset, partition, clients, seed, valid, test, public_per_class)
    whole.check()
    return whole


def _divide(
    dataset: Dataset, partition: str, clients: int, seed: int, valid: float, test: float, public_per_class: int
) -> Split:
    rule, arguments = parse(partition)
    if rule.by == "groups" and dataset.groups is None:
        raise Mistake(
            f"Partition '{rule.name}' needs natural groups, but '{dataset.name}' has none: use another, such as dirichlet:0.5."
        )
    y = dataset.labels.numpy()
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
    dataset, statistics = prepare(dataset, indices)
    x = add_noise(dataset, held, seed, **arguments) if rule.noise else dataset.x
    tables = {"x": x, "y": dataset.y}
    return Split(
        dataset=replace(dataset, x=x),
        clients={name: Data(*(rows_of(tables, some) for some in three)) for name, three in indices.items()},
        test=Rows(tables, dataset.test),
        public=rows_of(tables, public) if len(public) else None,
        public_test=rows_of(tables, public_test) if len(public_test) else None,
        partition=partition,
        repeats=rule.repeats,
        statistics=statistics,
    )


def prepare(dataset: Dataset, parts: Mapping[str, tuple[Index, ...]]) -> tuple[Dataset, dict[str, Plain]]:
    """A table prepared with statistics of the clients' training rows, and these statistics. Other data is ready already."""
    if dataset.raw is None or dataset.schema is None or dataset.preparation is not None:
        return dataset, {}
    statistics: dict[str, Plain] = {name: dataset.statistics(np.sort(part[0])) for name, part in parts.items()}
    return dataset.prepared(fit(dataset.schema, list(statistics.values()))), statistics


def rows_of(tables: Mapping[str, Tensor], index: Index) -> Rows:
    """Rows with these numbers, in ascending order."""
    return Rows(tables, torch.from_numpy(np.sort(index).astype(np.int64)))


def public_file(path: str, dataset: Dataset) -> Rows:
    """All rows of a user's file as public rows. They must have the data set's shape and classes and must not be among its rows."""
    public = load(path, classes=dataset.classes, schema=dataset.preparation or dataset.schema)
    shape, expected = tuple(public.x.shape[1:]), tuple(dataset.x.shape[1:])
    if shape != expected:
        raise Mistake(
            f"Rows of the public file '{path}' have shape {shape}, those of '{dataset.name}' {expected}: give the same shape."
        )
    held = {digest(dataset.x[i]) for i in torch.cat([dataset.train, dataset.test])}
    shared = sum(digest(x) in held for x in public.x)
    if shared:
        raise Mistake(
            f"{shared} rows of the public file '{path}' are also in '{dataset.name}', where clients train and test on them: "
            "give other rows, or set some aside (--public 10)."
        )
    return Rows.of(x=public.x, y=public.y)


def digest(x: Tensor) -> bytes:
    """A digest of a row's values."""
    return blake2b(as_float(x).contiguous().numpy().tobytes(), digest_size=16).digest()


def set_aside(dataset: Dataset, rule: PartitionRule, seed: int, per_class: int) -> tuple[Index, Index, Index]:
    """Row numbers for clients, public rows and public test rows. The latter two are taken evenly from every class."""
    if per_class < 0:
        raise Mistake(f"public_per_class must be at least 0, not {per_class}.")
    if per_class and rule.public:
        raise Mistake(
            f"The partition '{rule.name}' sets public rows aside itself: leave out public_per_class (--public)."
        )
    rng = numpy_generator(seed, "public")
    rows, y = dataset.train.numpy(), dataset.labels.numpy()
    rest: list[Index] = []
    public: list[Index] = []
    public_test: list[Index] = []
    for c in np.unique(y[rows]):
        mine = rng.permutation(rows[y[rows] == c])
        if per_class >= len(mine):
            raise Mistake(
                f"{per_class} public rows of each class would be all {len(mine)} training rows of class "
                f"'{dataset.label_names[c]}': use at most {len(mine) - 1} (--public, or public_per_class in Python)."
            )
        first = per_class or round(rule.public * len(mine))
        second = first + round(rule.public_test * len(mine))
        for bin_, some in zip((public, public_test, rest), np.split(mine, [first, second]), strict=True):
            bin_.append(some)
    return np.sort(np.concatenate(rest)), np.concatenate(public), np.concatenate(public_test)


def carve(
    part: Index, seed: int, name: str, valid: float, test: float, own: Index | None
) -> tuple[Index, Index, Index]:
    """The train, valid and test rows of a client; `own` are test rows it already has."""
    part = numpy_generator(seed, "split", name).permutation(part)
    n = len(part)
    tests = 0 if own is not None else some_of(n, test)
    valids = some_of(n - tests, valid)
    return part[tests + valids :], part[tests : tests + valids], part[:tests] if own is None else own


def some_of(n: int, share: float) -> int:
    """round(share n): at least one if the share is not 0, but never all."""
    return min(max(1, round(share * n)), n - 1) if share > 0 else 0


def group_ids(dataset: Dataset, parts: Parts) -> list[str]:
    """Node ids from the names of the clients' groups, made of letters, digits, '-', '_' and '.'."""
    assert dataset.groups is not None
    numbers = [int(dataset.groups[part[0]]) for part in parts]
    clean = [clean_name(dataset.group_names[g]) or f"g{g}" for g in numbers]
    return [name if clean.count(name) == 1 else f"{name}-{g}" for name, g in zip(clean, numbers, strict=True)]


def clean_name(group: str) -> str:
    """The name of a group as a node's id.

    >>> clean_name("St. Mary's")
    'St.-Mary-s'
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", group).strip("-")


def group_tests(dataset: Dataset, held: Mapping[str, Index], seed: int) -> dict[str, Index]:
    """The rows of each group in `dataset.test`, divided among its clients; if there are too few, each client gets all."""
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
    """Train, valid and test rows where clients share rows. A common pool is used for validation; tests come from `dataset.test`.

    Tests of client k: round(s n_kc) rows of class c, s = min(test / (1 - test), min_c available_c / n_kc).
    """
    size, y = len(dataset.y), dataset.labels.numpy()
    first = [part[0] for part in held.values()]  # every client keeps this one for training
    free = np.setdiff1d(np.concatenate(list(held.values())), first)
    pool = np.zeros(size, dtype=bool)
    pool[numpy_generator(seed, "valid pool").permutation(free)[: round(valid * len(free))]] = True
    tested = dataset.test.numpy()
    by_class = [tested[y[tested] == c] for c in range(len(dataset.label_names))]
    available = np.array([len(rows) for rows in by_class])
    out: dict[str, tuple[Index, Index, Index]] = {}
    for name, part in held.items():
        rng = numpy_generator(seed, "split", name)
        n = np.bincount(y[part], minlength=len(available))
        have = (n > 0) & (available > 0)
        scale = min([test / (1 - test), *(available[have] / n[have])])
        take = np.where(have, np.round(scale * n), 0).astype(int)
        if test > 0 and have.any() and take.sum() == 0:
            take[np.argmax(n * have)] = 1
        tests = np.concatenate([rng.permutation(rows)[:t] for rows, t in zip(by_class, take, strict=True)])
        out[name] = part[~pool[part]], part[pool[part]], tests
    return out


def add_noise(
    dataset: Dataset, held: Mapping[str, Index], seed: int, level: float, is_std: bool, **_: object
) -> Tensor:
    """A copy of the table with noise N(0, noise_std(k)^2) added to the rows of client k. Images are clipped to 0..1."""
    x = dataset.x
    noisy = x.clone()
    images = x.ndim > 2 and dataset.schema is None
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
