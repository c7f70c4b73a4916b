"""A study: which methods, on which cells of a grid, with which seeds; and the runs this needs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import product
from pathlib import Path

from kilter.core import Method
from kilter.data.partition_rules import parse as parse_partition
from kilter.errors import Mistake
from kilter.experiment import PUBLIC, Experiment
from kilter.methods import find
from kilter.options import default, own_fields
from kilter.plugins import is_file_spec
from kilter.records.toml_file import read_toml
from kilter.study.schema import (
    Cell,
    Entry,
    Table,
    Values,
    cell_name,
    check_names,
    conditions,
    divide,
    experiment_values,
    flag,
    matches,
    merge,
    read_budget,
    read_cells,
    read_entries,
    read_measure,
    read_paper,
    read_roles,
    read_seeds,
    read_target,
    table,
    with_preset,
)


@dataclass(frozen=True)
class Job:
    """One run of a study. Its folder is named by everything that decides its numbers."""

    cell: Cell
    label: str
    seed: int
    experiment: Experiment
    settings: Table = field(default_factory=dict)  # that tuning tries or chose

    @cached_property
    def folder(self) -> str:
        return run_name(self.experiment)

    @property
    def title(self) -> str:
        tuned = "".join(f" {k}={v:g}" if isinstance(v, float) else f" {k}={v}" for k, v in self.settings.items())
        return f"{self.cell.name}  {self.label}{tuned}  seed {self.seed}"


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
    common: Table
    when: tuple[tuple[dict[str, str], Table], ...]
    paper: Table
    tune: Table
    tune_budget: int
    source: Table  # the merged file, kept with the results
    preset: str = ""
    about: str = ""
    by_class: bool = False  # whether there are tables of each class

    @staticmethod
    def read(path: Path, preset: str = "", typed: Values | None = None) -> Study:
        """From a file. `typed` are options of the command line, which win."""
        return Study.of(read_toml(path), preset, typed, path.parent.name if path.stem == "study" else path.stem)

    @staticmethod
    def of(values: Values, preset: str = "", typed: Values | None = None, name: str = "study") -> Study:
        """From plain values, each checked. An unknown name gets the nearest known one."""
        merged = with_preset(values, preset, typed or {})
        entries = read_entries(merged.get("methods"))
        reference, proposed = read_roles(merged, entries)
        when = table(merged, "when")
        points = read_cells(table(merged, "grid"), merged.get("cells"))
        study = Study(
            name=str(merged.get("name", name)),
            about=str(merged.get("about", "")),
            reference=reference,
            seeds=read_seeds(merged.get("seeds", 5)),
            target=read_target(merged.get("target", "reference")),
            measure=read_measure(merged.get("measure", "global")),
            entries=entries,
            proposed=proposed,
            cells=tuple(Cell(point, str(point)) for point in points),
            common=experiment_values(table(merged, "experiment"), "[experiment]"),
            when=tuple((conditions(key), dict(table(when, key))) for key in when),
            paper=read_paper(table(merged, "paper")),
            tune=dict(table(merged, "tune")),
            tune_budget=read_budget(merged.get("tune_budget", 0)),
            source=merged,
            preset=preset,
            by_class=flag(merged, "by_class"),
        )
        for job in study.jobs():
            check_names(job.experiment)
        return study.with_named_cells()

    def with_named_cells(self) -> Study:
        """Name each cell by what its runs have in common."""
        first = [self.experiment(cell, self.entries[0], self.seeds[0]) for cell in self.cells]
        named = (Cell(c.values, cell_name(c.values, e)) for c, e in zip(self.cells, first, strict=True))
        return replace(self, cells=tuple(named))

    def entry(self, label: str) -> Entry:
        return next(e for e in self.entries if e.label == label)

    def experiment(self, cell: Cell, entry: Entry, seed: int, settings: Values | None = None) -> Experiment:
        """One run. Later values win: common fields, [when] tables, the cell, the method's own line, tuned settings."""
        values, free, own = dict(self.common), dict(entry.free), dict(entry.settings)
        fields = {**self.common, **cell.values}
        for wanted, changes in self.when:
            if not all(matches(entry, fields, k, v) for k, v in wanted.items()):
                continue
            where = "[when." + json.dumps(",".join(f"{k}={v}" for k, v in wanted.items())) + "]"
            if {"method", "label"} & set(wanted):
                mine, rest = divide(entry, changes, where)
                own, free = {**mine, **own}, {**rest, **free}  # the method's own line wins
                continue
            changed = experiment_values(changes, where)
            if clash := set(changed) & set(cell.values):
                raise Mistake(f"{where} sets '{min(clash)}', which the grid varies: keep it in one place.")
            values = merge(values, changed)
        values |= {**cell.values, **free, "method": entry.method, "seed": seed}
        if self._sets_rows_aside(values):
            values["public"] = PUBLIC
        return Experiment.of({**values, "settings": {**own, **(settings or {})}})

    def _sets_rows_aside(self, values: Values) -> bool:
        """Whether public rows are set aside in every run because one method needs some: all methods share the split."""
        needed = any("public" in find(entry.method).needs for entry in self.entries)
        if not needed or {"public", "public_file"} & set(values):
            return False
        rule = str(values.get("partition", "auto"))
        return rule == "auto" or not parse_partition(rule)[0].public

    def jobs(self, chosen: Mapping[tuple[str, str], Values] | None = None) -> list[Job]:
        """Every reported run, ordered by seed. `chosen` has tuned settings by (cell, label)."""
        jobs: list[Job] = []
        for seed, cell, entry in product(self.seeds, self.cells, self.entries):
            settings = dict((chosen or {}).get((cell.name, entry.label), {}))
            job = Job(cell, entry.label, seed, self.experiment(cell, entry, seed, settings), settings)
            jobs.append(job)
        return jobs

    def target_of(self, cell: Cell) -> float | None:
        """The target accuracy in this cell; None: the accuracy of the reference."""
        if isinstance(self.target, float):
            return self.target
        if isinstance(self.target, str):
            return None
        return self.target.get(str({**self.common, **cell.values}.get("data", Experiment().data)))


def run_name(e: Experiment) -> str:
    """The name of a run's folder. With the digest of the experiment, a run with changed settings has another folder."""
    method = Path(e.method).name.rpartition(":")[2]
    return f"{slug(f'{Path(e.data).stem}-{e.partition}-{method}-s{e.seed}')}-{digest(e)}"


def slug(text: str) -> str:
    """A text as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.=_]+", "-", text).strip("-")[:80]


def digest(e: Experiment) -> str:
    """Ten hex digits of everything that decides a run's numbers: all fields, with defaults, and the contents of files."""
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
