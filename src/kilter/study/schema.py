"""The parts of a study file, each checked: an unknown name gets the nearest right one."""

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
FREE = ("optimiser", "rounds", "topology", "evaluate_every", "patience")  # may differ between methods: pairing holds
MEASURES = ("global", "client", "local")


@dataclass(frozen=True)
class Entry:
    """One method of a study, with its settings."""

    label: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)  # the method's own fields and the optimiser's
    free: dict[str, Any] = field(default_factory=dict)  # fields of Experiment among FREE

    @property
    def own(self) -> set[str]:
        """The names of the method's own fields."""
        return set(own_fields(find(self.method), Method))


@dataclass(frozen=True)
class Cell:
    """One point of the grid: all methods are compared there on the same splits."""

    values: dict[str, Any]
    name: str


def known(values: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    names = list(names)
    for name in values:
        if name not in names:
            raise unknown(what, name, names)


def table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, Mapping):
        raise Mistake(f"'{key}' of the study is a table, not {found!r}.")
    return found


def flag(values: Mapping[str, Any], key: str) -> bool:
    found = values.get(key, False)
    if not isinstance(found, bool):
        raise Mistake(f"'{key}' of the study is true or false, not {found!r}.")
    return found


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables go together key by key; anything else is replaced."""
    both = dict(under)
    for key, value in over.items():
        old = both.get(key)
        both[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def override(values: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed wins over the file, its grid and its [when] tables."""
    out = merge({}, values)
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
    if not isinstance(changes, Mapping):
        return changes
    return {k: drop_key(v, key) if k == "local" else v for k, v in changes.items() if k != key}


def experiment_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of Experiment; the optimiser's may stand among them."""
    known(values, [*EXPERIMENT, *LOCAL], f"field in {where}")
    out = {k: v for k, v in values.items() if k not in LOCAL}
    flat = {k: v for k, v in values.items() if k in LOCAL}
    return {**out, "local": {**table(values, "local"), **flat}} if flat else out


def read_entries(methods: Any) -> tuple[Entry, ...]:
    if not isinstance(methods, list) or not methods:
        raise Mistake(
            'The study names no methods: give some, such as methods = ["fedavg", {method = "fedprox", mu = 0.1}].'
        )
    found: dict[str, Entry] = {}
    for given in methods:
        values = {"method": given} if isinstance(given, str) else given
        if not isinstance(values, Mapping) or not isinstance(values.get("method"), str):
            raise Mistake(f"A method is a name or a table with `method = NAME` and its settings, not {given!r}.")
        entry = Entry(values["method"], values["method"])
        own, free = divide(entry, {k: v for k, v in values.items() if k not in ("method", "label")}, entry.method)
        short = Path(entry.method).name.rpartition(":")[2] if is_file_spec(entry.method) else entry.method
        label = str(values.get("label", " ".join([short, *(f"{k}={v}" for k, v in {**own, **free}.items())])))
        if label in found:
            raise Mistake(f"Two methods of the study are called '{label}': give one of them another label.")
        found[label] = Entry(label, entry.method, own, free)
    return tuple(found.values())


def divide(entry: Entry, values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the method or its optimiser, and free fields of the experiment."""
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


def read_seeds(given: Any) -> tuple[int, ...]:
    numbers = range(given) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(numbers, list | tuple | range) or not len(numbers):
        raise Mistake(f"seeds is how many, or a list of them, not {given!r}.")
    for n in numbers:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise Mistake(f"A seed is a whole number of at least 0, not {n!r}.")
    if len(set(numbers)) < len(numbers):
        raise Mistake("A seed is named twice: a run repeated with its seed is the same run, not one more.")
    return tuple(numbers)


def read_target(given: Any) -> float | str | dict[str, float]:
    def share(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise Mistake(f'target is an accuracy in 0..1, a table of them by data set, or "reference", not {value!r}.')
        return float(value)

    if isinstance(given, Mapping):
        return {str(k): share(v) for k, v in given.items()}
    return "reference" if given == "reference" else share(given)


def read_cells(grid: Mapping[str, Any], listed: Any = None) -> list[dict[str, Any]]:
    """The product of the grid's values; where cells are listed one by one, each of them with each point of the grid."""
    allowed = [f for f in EXPERIMENT if f != "local"]
    for key, values in grid.items():
        if key in ("seed", "seeds", "method", "methods"):
            raise Mistake(f"'{key}' does not belong in the grid: give {key.rstrip('s')}s at the top of the study.")
        known({key: None}, allowed, "field in [grid]")
        if not isinstance(values, list) or not values:
            raise Mistake(f"'{key}' of the grid takes a list of at least one value, not {values!r}.")
        if len({str(v) for v in values}) < len(values):
            raise Mistake(f"'{key}' of the grid names a value twice.")
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if listed is None:
        return points
    if not isinstance(listed, list) or not listed or not all(isinstance(c, Mapping) for c in listed):
        raise Mistake('cells are a list of tables, such as cells = [{ data = "mnist", partition = "iid" }].')
    for given in listed:
        known(given, allowed, "field in cells")
        if both := set(given) & set(grid):
            raise Mistake(f"'{min(both)}' is in cells and in [grid]: keep it in one place.")
    found = [{**given, **point} for given, point in product(listed, points)]
    if len({str(sorted(c.items())) for c in found}) < len(found):
        raise Mistake("The study lists a cell twice.")
    return found


def cell_name(values: Mapping[str, Any], e: Experiment) -> str:
    """Its data and partition, wherever the study sets them, and whatever else the grid varies."""
    words = [Path(e.data).stem, e.partition]
    rest = {k: v for k, v in values.items() if k not in ("data", "partition")}
    return ", ".join(words + [str(v) if k == "topology" else f"{k} {v}" for k, v in rest.items()])


def read_paper(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a paper prints: `source`, and `numbers`, each for a method and some fields of a cell."""
    known(given, ("source", "numbers"), "key of [paper]")
    numbers = given.get("numbers", [])
    if not isinstance(numbers, list) or any(not isinstance(n, Mapping) or "method" not in n for n in numbers):
        raise Mistake("[[paper.numbers]] are tables, each with `method` and what the paper prints for it.")
    for n in numbers:
        known(n, ("method", *MEASURES, "rounds_to", "std", *EXPERIMENT), "key of [[paper.numbers]]")
        for key in (*MEASURES, "rounds_to", "std"):
            if isinstance(n.get(key, 0), bool) or not isinstance(n.get(key, 0), int | float):
                raise Mistake(f"'{key}' of [[paper.numbers]] is a number, not {n[key]!r}.")
    return dict(given)


def conditions(text: str) -> dict[str, str]:
    """`data=cifar10,partition=iid` as a table."""
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not equals or not key.strip() or not value.strip() for key, equals, value in pairs):
        raise Mistake(f'[when."{text}"] must be named FIELD=VALUE, such as [when."data=cifar10"].')
    return {key.strip(): value.strip() for key, _, value in pairs}


def matches(entry: Entry, seen: Mapping[str, Any], key: str, value: str) -> bool:
    if key in ("method", "label"):
        return str(getattr(entry, key)) == value
    return str(seen.get(key, getattr(Experiment(), key))) == value


def check_conditions(base: Mapping[str, Any], presets: Sequence[Mapping[str, Any]]) -> None:
    """A [when] must be able to match something the file names, with or without a preset."""
    parts: list[Mapping[str, Any]] = [base, *presets]
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
    """Data, partition and model are looked at before the first run, not in the middle of the study."""
    given = Path(e.data).expanduser()
    if e.data not in DATASETS and not given.exists():
        if given.suffix or "/" in e.data:
            raise Mistake(f"There is no data at '{e.data}': check the path.")
        raise unknown("data set", e.data, DATASETS)
    for what, spec, there in (("partition", e.partition, PARTITIONS), ("model", e.model, MODELS)):
        if not is_file_spec(spec) and spec.split(":")[0] not in {name.split(":")[0] for name in there}:
            raise unknown(what, spec.split(":")[0], {name.split(":")[0] for name in there})
