"""Reads the parts of a study file and checks them. An unknown name gets the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from kilter.core import Method
from kilter.data import DATASETS, PARTITIONS
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment
from kilter.methods import find
from kilter.models import MODELS
from kilter.options import own_fields
from kilter.plugins import is_file_spec
from kilter.train import PLANS

KEYS = (
    "name", "about", "reference", "seeds", "target", "measure", "methods", "proposed", "grid", "cells", "experiment", "when",
    "by_class", "presets", "paper", "tune", "tune_budget",
)  # fmt: skip
EXPERIMENT = tuple(f.name for f in fields(Experiment) if f.name not in ("method", "settings", "seed"))
LOCAL = tuple(dict.fromkeys(f.name for plan in PLANS.values() for f in fields(plan)))
FREE = (
    "optimiser",
    "rounds",
    "topology",
    "evaluate_every",
    "patience",
)  # may differ between methods without breaking pairs
MEASURES = ("global", "client", "local")
COMPARED = (*MEASURES, "skewed")  # skewed: `local` over the clients whose labels are skewed, where others are not
Values = Mapping[str, Any]  # a table of a study file
Table = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One method of a study, with its settings."""

    label: str
    method: str
    settings: Table = field(default_factory=dict)  # the method's own fields and the optimiser's
    free: Table = field(default_factory=dict)  # fields of Experiment among FREE

    @property
    def own(self) -> set[str]:
        """The names of the method's own fields."""
        return set(own_fields(find(self.method), Method))


@dataclass(frozen=True)
class Cell:
    """One point of the grid: all methods are compared there on the same splits."""

    values: Table
    name: str


def with_preset(values: Values, preset: str, typed: Values) -> Table:
    """The study with a preset and typed options merged in."""
    known(values, KEYS, "key of the study")
    presets = table(values, "presets")
    for which in presets:
        known(table(presets, which), [k for k in KEYS if k not in ("presets", "name")], f"key of preset {which}")
    if preset and preset not in presets:
        if not presets:
            raise Mistake(f"The study has no presets, but '{preset}' was requested.")
        raise unknown("preset", preset, presets)
    base = {k: v for k, v in values.items() if k != "presets"}
    check_conditions(base, list(presets.values()))
    return override(merge(base, presets[preset]) if preset else base, typed)


def known(values: Values, names: Iterable[str], what: str) -> None:
    """Refuse keys that are not among these names."""
    names = list(names)
    for name in values:
        if name not in names:
            raise unknown(what, name, names)


def table(values: Values, key: str) -> Values:
    """A table of the study; empty if it is missing."""
    value = values.get(key, {})
    if not isinstance(value, Mapping):
        raise Mistake(f"'{key}' of the study must be a table, not {value!r}.")
    return value


def flag(values: Values, key: str) -> bool:
    """A value that is true or false."""
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise Mistake(f"'{key}' of the study must be true or false, not {value!r}.")
    return value


def merge(under: Values, over: Values) -> Table:
    """Merge tables key by key; other values of `over` win."""
    both = dict(under)
    for key, value in over.items():
        old = both.get(key)
        both[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def override(values: Values, typed: Values) -> Table:
    """Typed options win over the file, its grid and its [when] tables."""
    out: Table = merge({}, values)
    for key, value in typed.items():
        if key in KEYS:
            out[key] = value
            continue
        flat = {**out, "experiment": dict(out.get("experiment", {})), "grid": dict(out.get("grid", {}))}
        flat["experiment"] = {
            k: v for k, v in experiment_values(flat["experiment"], "[experiment]").items() if k != key
        }
        flat["grid"].pop(key, None)
        if isinstance(out.get("cells"), list):
            left = [drop_key(c, key) for c in out["cells"]]
            flat["cells"] = [c for at, c in enumerate(left) if c not in left[:at]]
        flat["when"] = {k: drop_key(v, key) for k, v in dict(out.get("when", {})).items()}
        if isinstance(value, list):
            flat["grid"][key] = value
        elif key in LOCAL:
            flat["experiment"]["local"] = {**flat["experiment"].get("local", {}), key: value}
        else:
            flat["experiment"][key] = value
        out = flat
    return out


def drop_key(changes: Any, key: str) -> Any:
    """A table without this key, nor in its `local` table."""
    if not isinstance(changes, Mapping):
        return changes
    return {k: drop_key(v, key) if k == "local" else v for k, v in changes.items() if k != key}


def experiment_values(values: Values, where: str) -> Table:
    """Fields of Experiment. Fields of the optimiser may be among them."""
    known(values, [*EXPERIMENT, *LOCAL], f"field in {where}")
    out = {k: v for k, v in values.items() if k not in LOCAL}
    flat = {k: v for k, v in values.items() if k in LOCAL}
    return {**out, "local": {**table(values, "local"), **flat}} if flat else out


def read_entries(methods: object) -> tuple[Entry, ...]:
    """The methods of the study, each a name or a table with settings."""
    if not isinstance(methods, list) or not methods:
        raise Mistake(
            'The study has no methods: list some, such as methods = ["fedavg", {method = "fedprox", mu = 0.1}].'
        )
    entries: dict[str, Entry] = {}
    for method in methods:
        values = {"method": method} if isinstance(method, str) else method
        if not isinstance(values, Mapping) or not isinstance(values.get("method"), str):
            raise Mistake(f"A method is a name or a table with `method = NAME` and its settings, not {method!r}.")
        entry = Entry(values["method"], values["method"])
        own, free = divide(entry, {k: v for k, v in values.items() if k not in ("method", "label")}, entry.method)
        short = Path(entry.method).name.rpartition(":")[2] if is_file_spec(entry.method) else entry.method
        label = str(values.get("label", " ".join([short, *(f"{k}={v}" for k, v in {**own, **free}.items())])))
        if label in entries:
            raise Mistake(f"Two methods of the study are called '{label}': give one of them another label.")
        entries[label] = Entry(label, entry.method, own, free)
    return tuple(entries.values())


def read_roles(values: Values, entries: Sequence[Entry]) -> tuple[str, tuple[str, ...]]:
    """The label of the reference, and the labels of the proposed methods."""
    labels = [e.label for e in entries]
    reference = str(values.get("reference", labels[0]))
    proposed = tuple(values.get("proposed", ()))
    for what, label in [("reference", reference), *(("proposed method", p) for p in proposed)]:
        if label not in labels:
            raise unknown(f"{what} (it must be one of the study's methods)", label, labels)
    if proposed and not set(labels) - set(proposed):
        raise Mistake("Every method is 'proposed': leave at least one baseline.")
    return reference, proposed


def read_measure(measure: object) -> str:
    """The accuracy that the target is about."""
    if measure not in MEASURES:
        raise unknown("measure", str(measure), MEASURES)
    return str(measure)


def read_budget(budget: object) -> int:
    """The number of tuning runs of each method in each cell; 0: as many as the largest grid of candidates needs."""
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise Mistake(f"tune_budget is a number of runs for each method, not {budget!r}.")
    return budget


def divide(entry: Entry, values: Values, where: str) -> tuple[Table, Table]:
    """Split values into settings of the method or its optimiser, and free fields of the experiment."""
    own = entry.own
    for name in values:
        if name in own or name in LOCAL or name in FREE:
            continue
        if name in EXPERIMENT:
            raise Mistake(
                f"'{name}' of {where} would give this method other splits, weights or clients than the rest: "
                "put it into [experiment], where all methods share it."
            )
        raise unknown(
            f"setting of {entry.method} in {where}" if where != entry.method else f"setting of {where}",
            name,
            [*own, *LOCAL, *FREE],
        )
    mine = {k: v for k, v in values.items() if k in own or k not in FREE}
    return mine, {k: v for k, v in values.items() if k not in mine}


def read_seeds(seeds: object) -> tuple[int, ...]:
    """A number of seeds, or a list of them."""
    numbers = range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    if not isinstance(numbers, list | tuple | range) or not len(numbers):
        raise Mistake(f"seeds is a number of seeds or a list of them, not {seeds!r}.")
    for n in numbers:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise Mistake(f"A seed is a whole number of at least 0, not {n!r}.")
    if len(set(numbers)) < len(numbers):
        raise Mistake("A seed is listed twice: a run repeated with the same seed is the same run.")
    return tuple(numbers)


def read_target(target: object) -> float | str | dict[str, float]:
    """An accuracy, a table of them by data set, or "reference"."""

    def share(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise Mistake(f'target is an accuracy in 0..1, a table of them by data set, or "reference", not {value!r}.')
        return float(value)

    if isinstance(target, Mapping):
        return {str(k): share(v) for k, v in target.items()}
    return "reference" if target == "reference" else share(target)


def read_cells(grid: Values, listed: object = None) -> list[Table]:
    """All combinations of the grid's values. With a list of cells: each of them with each combination."""
    allowed = [f for f in EXPERIMENT if f != "local"]
    for key, values in grid.items():
        if key in ("seed", "seeds", "method", "methods"):
            raise Mistake(f"'{key}' does not belong in the grid: put {key.rstrip('s')}s at the top of the study.")
        known({key: None}, allowed, "field in [grid]")
        if not isinstance(values, list) or not values:
            raise Mistake(f"'{key}' of the grid takes a list of at least one value, not {values!r}.")
        if len({str(v) for v in values}) < len(values):
            raise Mistake(f"'{key}' of the grid lists a value twice.")
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if listed is None:
        return points
    if not isinstance(listed, list) or not listed or not all(isinstance(c, Mapping) for c in listed):
        raise Mistake('cells are a list of tables, such as cells = [{ data = "mnist", partition = "iid" }].')
    for cell in listed:
        known(cell, allowed, "field in cells")
        if both := set(cell) & set(grid):
            raise Mistake(f"'{min(both)}' is in cells and in [grid]: keep it in one place.")
    cells = [{**cell, **point} for cell, point in product(listed, points)]
    if len({str(sorted(c.items())) for c in cells}) < len(cells):
        raise Mistake("The study lists a cell twice.")
    return cells


def cell_name(values: Values, e: Experiment) -> str:
    """The name of a cell: its data and partition, and whatever else the grid varies."""
    words = [Path(e.data).stem, e.partition]
    rest = {k: v for k, v in values.items() if k not in ("data", "partition")}
    return ", ".join(words + [str(v) if k == "topology" else f"{k} {v}" for k, v in rest.items()])


def read_paper(paper: Values) -> Table:
    """The numbers a paper prints: `source`, and `numbers`, each for a method and some fields of a cell."""
    known(paper, ("source", "numbers"), "key of [paper]")
    numbers = paper.get("numbers", [])
    if not isinstance(numbers, list) or any(not isinstance(n, Mapping) or "method" not in n for n in numbers):
        raise Mistake("[[paper.numbers]] are tables, each with a `method` and the numbers the paper prints for it.")
    for n in numbers:
        known(n, ("method", *MEASURES, "rounds_to", "std", *EXPERIMENT), "key of [[paper.numbers]]")
        for key in (*MEASURES, "rounds_to", "std"):
            if isinstance(n.get(key, 0), bool) or not isinstance(n.get(key, 0), int | float):
                raise Mistake(f"'{key}' of [[paper.numbers]] is a number, not {n[key]!r}.")
    return dict(paper)


def conditions(text: str) -> dict[str, str]:
    """`data=cifar10,partition=iid` as a table."""
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not equals or not key.strip() or not value.strip() for key, equals, value in pairs):
        raise Mistake(f'[when."{text}"] must be named FIELD=VALUE, such as [when."data=cifar10"].')
    return {key.strip(): value.strip() for key, _, value in pairs}


def matches(entry: Entry, fields: Values, key: str, value: str) -> bool:
    """Whether a method and the fields of a run fulfil one condition of a [when]."""
    if key in ("method", "label"):
        return str(getattr(entry, key)) == value
    return str(fields.get(key, getattr(Experiment(), key))) == value


def check_conditions(base: Values, presets: Sequence[Values]) -> None:
    """Refuse a [when] that can match nothing in the file, with or without a preset."""
    parts: list[Values] = [base, *presets]
    entries = [e for p in parts if "methods" in p for e in read_entries(p["methods"])]
    for text in [w for p in parts for w in table(p, "when")]:
        for key, value in conditions(text).items():
            known({key: None}, [*EXPERIMENT, "method", "label"], f'field in [when."{text}"]')
            if key in ("method", "label"):
                there = {str(getattr(e, key)) for e in entries}
            else:
                listed = [table(p, "grid").get(key, []) for p in parts]
                listed += [[c[key] for c in p.get("cells", []) if isinstance(c, Mapping) and key in c] for p in parts]
                there = {str(v) for some in listed if isinstance(some, list) for v in some}
                there |= {str(table(p, "experiment")[key]) for p in parts if key in table(p, "experiment")}
                there |= {str(getattr(Experiment(), key))}
            if value not in there:
                raise unknown(f'{key} in [when."{text}"]', value, there)


def check_names(e: Experiment) -> None:
    """Check data, partition and model before the first run, not in the middle of the study."""
    path = Path(e.data).expanduser()
    if e.data not in DATASETS and not path.exists():
        if path.suffix or "/" in e.data:
            raise Mistake(f"There is no data at '{e.data}': check the path.")
        raise unknown("data set", e.data, DATASETS)
    for what, spec, there in (("partition", e.partition, PARTITIONS), ("model", e.model, MODELS)):
        if (
            spec != "auto"
            and not is_file_spec(spec)
            and spec.split(":")[0] not in {name.split(":")[0] for name in there}
        ):
            raise unknown(what, spec.split(":")[0], {name.split(":")[0] for name in there})
