"""A study file: which methods, on which cells of a grid, with which seeds; and the runs that this asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

from kilter.core import Method
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment, read_toml
from kilter.methods import find
from kilter.options import default, own_fields
from kilter.plugins import is_file_spec
from kilter.study.schema import (
    KEYS,
    MEASURES,
    Cell,
    Entry,
    cell_name,
    check_conditions,
    check_names,
    conditions,
    divide,
    experiment_values,
    flag,
    known,
    matches,
    merge,
    override,
    read_cells,
    read_entries,
    read_paper,
    read_seeds,
    read_target,
    table,
)


@dataclass(frozen=True)
class Job:
    """One run of a study: an ordinary run folder, named by everything that decides its numbers."""

    cell: Cell
    label: str
    seed: int
    experiment: Experiment
    settings: dict[str, Any] = field(default_factory=dict)  # what tuning tries, or has chosen

    @cached_property
    def folder(self) -> str:
        """Its folder's name; the digest is of the whole experiment, so that changed settings are another run."""
        e = self.experiment
        method = Path(e.method).name.rpartition(":")[2]
        return f"{slug(f'{Path(e.data).stem}-{e.partition}-{method}-s{e.seed}')}-{digest(e)}"

    @property
    def title(self) -> str:
        tried = "".join(f" {k}={v:g}" if isinstance(v, float) else f" {k}={v}" for k, v in self.settings.items())
        return f"{self.cell.name}  {self.label}{tried}  seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs."""

    name: str
    reference: str
    seeds: tuple[int, ...]
    target: float | str | dict[str, float]
    measure: str
    entries: tuple[Entry, ...]
    proposed: tuple[str, ...]
    cells: tuple[Cell, ...]
    common: dict[str, Any]
    when: tuple[tuple[dict[str, str], dict[str, Any]], ...]
    paper: dict[str, Any]
    tune: dict[str, Any]
    tune_budget: int
    source: dict[str, Any]  # the merged file, to be kept beside the results
    preset: str = ""
    about: str = ""
    by_class: bool = False  # whether the tables have every class by itself

    @staticmethod
    def read(path: Path, preset: str = "", typed: Mapping[str, Any] | None = None) -> Study:
        """From a file; `typed` is what the command line says instead."""
        return Study.of(read_toml(path), preset, typed, path.parent.name if path.stem == "study" else path.stem)

    @staticmethod
    def of(
        values: Mapping[str, Any], preset: str = "", typed: Mapping[str, Any] | None = None, name: str = "study"
    ) -> Study:
        """From plain values, each checked: an unknown name gets the nearest right one."""
        known(values, KEYS, "key of the study")
        presets = table(values, "presets")
        for which in presets:
            known(table(presets, which), [k for k in KEYS if k not in ("presets", "name")], f"key of preset {which}")
        if preset and preset not in presets:
            if not presets:
                raise Mistake(f"The study has no presets, but '{preset}' was asked for.")
            raise unknown("preset", preset, presets)
        base = {k: v for k, v in values.items() if k != "presets"}
        merged = merge(base, presets[preset]) if preset else base
        check_conditions(base, list(presets.values()))
        merged = override(merged, typed or {})
        entries = read_entries(merged.get("methods"))
        labels = [e.label for e in entries]
        reference = str(merged.get("reference", labels[0]))
        proposed = tuple(merged.get("proposed", ()))
        for what, label in [("reference", reference), *(("proposed method", p) for p in proposed)]:
            if label not in labels:
                raise unknown(f"{what} (it must be one of the study's methods)", label, labels)
        if proposed and not set(labels) - set(proposed):
            raise Mistake("Every method is 'proposed': leave at least one baseline.")
        measure = merged.get("measure", "global")
        if measure not in MEASURES:
            raise unknown("measure", str(measure), MEASURES)
        common = experiment_values(table(merged, "experiment"), "[experiment]")
        when = tuple((conditions(k), dict(table(table(merged, "when"), k))) for k in table(merged, "when"))
        budget = merged.get("tune_budget", 0)
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
            raise Mistake(f"tune_budget is a number of runs for each method, not {budget!r}.")
        study = Study(
            name=str(merged.get("name", name)),
            about=str(merged.get("about", "")),
            reference=reference,
            seeds=read_seeds(merged.get("seeds", 5)),
            target=read_target(merged.get("target", "reference")),
            measure=measure,
            entries=entries,
            proposed=proposed,
            cells=tuple(Cell(values, str(values)) for values in read_cells(table(merged, "grid"), merged.get("cells"))),
            common=common,
            when=when,
            paper=read_paper(table(merged, "paper")),
            tune=dict(table(merged, "tune")),
            tune_budget=budget,
            source=merged,
            preset=preset,
            by_class=flag(merged, "by_class"),
        )
        for job in study.jobs():
            check_names(job.experiment)
        first = [study.experiment(cell, entries[0], study.seeds[0]) for cell in study.cells]
        named = (Cell(c.values, cell_name(c.values, e)) for c, e in zip(study.cells, first, strict=True))
        return replace(study, cells=tuple(named))

    def entry(self, label: str) -> Entry:
        return next(e for e in self.entries if e.label == label)

    def experiment(self, cell: Cell, entry: Entry, seed: int, settings: Mapping[str, Any] | None = None) -> Experiment:
        """One run: common fields, then those for this cell, then the cell's own, then the method's, then what is tuned."""
        values, free, own = dict(self.common), dict(entry.free), dict(entry.settings)
        seen = {**self.common, **cell.values}
        for wanted, changes in self.when:
            if not all(matches(entry, seen, k, v) for k, v in wanted.items()):
                continue
            where = "[when." + json.dumps(",".join(f"{k}={v}" for k, v in wanted.items())) + "]"
            if {"method", "label"} & set(wanted):
                mine, rest = divide(entry, changes, where)
                own, free = {**mine, **own}, {**rest, **free}  # what the method's own line says stays
                continue
            changed = experiment_values(changes, where)
            if clash := set(changed) & set(cell.values):
                raise Mistake(f"{where} sets '{min(clash)}', which the grid varies: keep it in one place.")
            values = merge(values, changed)
        values |= {**cell.values, **free, "method": entry.method, "seed": seed}
        return Experiment.of({**values, "settings": {**own, **(settings or {})}})

    def jobs(self, chosen: Mapping[tuple[str, str], Mapping[str, Any]] | None = None) -> list[Job]:
        """Every reported run, first all cells and methods of the first seed; `chosen` has tuned settings by (cell, label)."""
        found: list[Job] = []
        for seed, cell, entry in product(self.seeds, self.cells, self.entries):
            settings = dict((chosen or {}).get((cell.name, entry.label), {}))
            job = Job(cell, entry.label, seed, self.experiment(cell, entry, seed, settings), settings)
            found.append(job)
        return found

    def target_of(self, cell: Cell) -> float | None:
        """The target accuracy in this cell; None: the reference's own."""
        if isinstance(self.target, float):
            return self.target
        if isinstance(self.target, str):
            return None
        return self.target.get(str({**self.common, **cell.values}.get("data", Experiment().data)))


def slug(text: str) -> str:
    """Fit for a folder's name."""
    return re.sub(r"[^A-Za-z0-9.=_]+", "-", text).strip("-")[:80]


def digest(e: Experiment) -> str:
    """Ten hex digits of everything that decides a run's numbers: every field, defaults too, and the text of the user's files."""
    own = {name: default(f) for name, f in own_fields(find(e.method), Method).items()}
    values = {**asdict(e), "settings": {**own, **e.settings}}
    named = [spec.rpartition(":")[0] for spec in (e.method, e.model) if is_file_spec(spec)]
    files = [Path(f) for f in [*named, e.data, e.weights, e.public_file] if f and Path(f).is_file()]
    contents = [blake2b(f.read_bytes(), digest_size=16).hexdigest() for f in files]
    if Path(e.data).is_dir():
        stats = [(str(f.relative_to(e.data)), f.stat().st_size) for f in sorted(Path(e.data).rglob("*")) if f.is_file()]
        contents.append(json.dumps(stats))
    text = json.dumps([values, contents], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=5).hexdigest()
