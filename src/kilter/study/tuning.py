"""Choose hyper-parameters on validation rows, never on test rows, with the same budget for every method.

Every method that has something to tune gets the same number of runs in each cell, B: the largest number of candidates of any
method, or `tune_budget`. A method with fewer candidates tries each with B // candidates seeds. A method with more candidates
tries B of them, drawn at random from the study's name. Tuning uses seeds of its own, after the reported ones, so that a choice
does not favour the runs it is judged by. The score is the validation accuracy at the last round, over all clients' validation
rows; for tasks without accuracy, the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kilter.errors import Mistake, unknown
from kilter.metrics import Direction, direction
from kilter.records.run_folder import read_summary
from kilter.seeds import numpy_generator
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.schema import LOCAL, Cell, Entry, matches

Settings = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """The choice of tuning for a method in a cell."""

    cell: str
    label: str
    settings: Settings
    score: float | None  # the best mean on validation rows; None: there was only one candidate, or no run finished
    runs: int
    tried: list[tuple[Settings, float | None]] = field(default_factory=list)
    metric: str = "accuracy"  # what the score is


def grid_of(study: Study, entry: Entry) -> dict[str, list[Any]]:
    """The values to try for each field of this method. A field that its line in the study sets is not tuned."""
    grid: dict[str, list[Any]] = {}
    for name, values in study.tune.items():
        if isinstance(values, Mapping):
            if name in (entry.method, entry.label):
                grid |= {k: list(v) for k, v in values.items()}
        elif name in entry.own or name in LOCAL:
            grid[name] = list(values)
    return {k: v for k, v in grid.items() if k not in entry.settings}


def check(study: Study) -> None:
    """Refuse fields to tune that are not lists or that no method of the study has."""
    everywhere = {name for e in study.entries for name in e.own} | set(LOCAL)
    names = {n for e in study.entries for n in (e.method, e.label)}
    for name, values in study.tune.items():
        if isinstance(values, Mapping):
            if name not in names:
                raise unknown("method in [tune]", name, names)
            for entry in study.entries:
                if name in (entry.method, entry.label):
                    for key in values:
                        if key not in entry.own and key not in LOCAL:
                            raise unknown(f"setting of {name} in [tune]", key, [*entry.own, *LOCAL])
        elif name not in everywhere:
            raise unknown("field to tune (no method of the study has it)", name, everywhere)
        for key, some in values.items() if isinstance(values, Mapping) else [(name, values)]:
            if not isinstance(some, list) or not some:
                raise Mistake(f"'{key}' of [tune] takes a list of values to try, not {some!r}.")
    if study.tune:
        for job in study.jobs():
            if job.experiment.valid <= 0:
                raise Mistake("Tuning needs validation rows: set `valid` above 0.")


def candidates(study: Study, entry: Entry) -> list[Settings]:
    """All combinations of the values to try; empty if there are none."""
    grid = grid_of(study, entry)
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())] if grid else []


def budget(study: Study) -> int:
    """The number of tuning runs of each method in each cell."""
    return study.tune_budget or max((len(candidates(study, e)) for e in study.entries), default=0)


def trials(study: Study) -> list[Job]:
    """All tuning runs."""
    check(study)
    jobs: list[Job] = []
    runs = budget(study)
    for cell, entry in product(study.cells, study.entries):
        settings_list = candidates(study, entry)
        if len(settings_list) < 2:
            continue
        if len(settings_list) > runs:
            keep = numpy_generator("tune", study.name, entry.label).permutation(len(settings_list))[:runs]
            settings_list = [settings_list[k] for k in sorted(keep)]
        for settings in settings_list:
            for seed in range(max(study.seeds) + 1, max(study.seeds) + 1 + max(1, runs // len(settings_list))):
                jobs.append(Job(cell, entry.label, seed, study.experiment(cell, entry, seed, settings), settings))
    for job in jobs:
        refuse_fixed(study, job.cell, study.entry(job.label))
    return jobs


def refuse_fixed(study: Study, cell: Cell, entry: Entry) -> None:
    """Refuse to tune a field that a [when] sets for this method and cell."""
    fields = {**study.common, **cell.values}
    for wanted, changes in study.when:
        mine = {"method", "label"} & set(wanted)
        if mine and all(matches(entry, fields, k, v) for k, v in wanted.items()):
            for name in set(changes) & set(grid_of(study, entry)):
                raise Mistake(f"'{name}' of {entry.label} is both set by a [when] and tuned: keep one of the two.")


@dataclass(frozen=True)
class Score:
    """A validation metric of one run."""

    value: float
    metric: str
    better: Direction


def choose(study: Study, jobs: Sequence[Job], folder: Folder) -> dict[tuple[str, str], Choice]:
    """The candidate with the best mean score in each cell, the first of equals, from the finished trials."""
    choices: dict[tuple[str, str], Choice] = {}
    for cell, entry in product(study.cells, study.entries):
        settings = candidates(study, entry)
        if settings:
            mine = [j for j in jobs if j.cell.name == cell.name and j.label == entry.label]
            scores = [([score(folder, j) for j in mine if j.settings == s], s) for s in settings if mine]
            choices[cell.name, entry.label] = _best(cell.name, entry.label, settings[0], len(mine), scores)
    return choices


def _best(
    cell: str, label: str, first: Settings, runs: int, scores: Sequence[tuple[list[Score | None], Settings]]
) -> Choice:
    """The best candidate. A candidate with an unfinished run has no score; if none has a score, the first is chosen."""
    tried: list[tuple[Settings, float | None]] = []
    best: tuple[float, Settings, Score] | None = None
    for some, settings in scores:
        known = [s for s in some if s is not None]
        mean = sum(s.value for s in known) / len(known) if known and len(known) == len(some) else None
        if some:
            tried.append((settings, mean))
        if mean is not None:
            rank = mean if known[0].better == "higher" else -mean
            best = best if best and best[0] >= rank else (rank, settings, known[0])
    if best is None:
        return Choice(cell, label, first, None, runs, tried)
    rank, settings, example = best
    return Choice(cell, label, settings, rank if example.better == "higher" else -rank, runs, tried, example.metric)


def score(folder: Folder, job: Job) -> Score | None:
    """The task's main metric on validation rows at the last round. None if the run did not finish."""
    if not folder.is_done(job):
        return None
    summary = read_summary(folder.run(job))
    valid = summary.last.valid or {}
    metric = summary.chosen_by if summary.chosen_by in valid else "loss"
    value = valid.get(metric)
    return None if value is None else Score(value, metric, summary.directions.get(metric) or direction(metric))
