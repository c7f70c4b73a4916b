"""Repeat one cheap run of a published study on this machine, and compare it with the published one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kilter.study.grid import Job, Study
from kilter.study.results import Run, read_run
from kilter.study.runner import run_one
from kilter.study.schema import MEASURES
from kilter.study.stored import as_run

EXACT = 5e-7  # results.json rounds curves to six digits


@dataclass(frozen=True)
class Repeated:
    """A published run and how far a repetition is from it."""

    study: str
    title: str
    published: dict[str, float]  # final accuracy by measure
    repeated: dict[str, float]
    drift: float  # largest difference of any evaluated accuracy, in points
    seconds: float
    machine: str  # of the published run

    @property
    def is_same(self) -> bool:
        return self.drift == 0

    def __str__(self) -> str:
        words = "same bits" if self.is_same else f"differs by up to {self.drift:.2f} points"
        return f"{self.study}: {words}  ({self.title}; {self.seconds:.0f} s; published on {self.machine})"


def cheapest(study: Study, folder: Path) -> tuple[Job, Run]:
    """The published run that took the least time and sent something, so that it is not the baseline of training alone."""
    lines = json.loads((folder / "results.json").read_text())["lines"]
    runs = {(line["cell"], line["method"], r["seed"]): as_run(r) for line in lines for r in line["runs"]}
    jobs = {(job.cell.name, job.label, job.seed): job for job in study.jobs()}
    known = [key for key in jobs if key in runs and any(runs[key].spent.values())]
    key = min(known, key=lambda k: runs[k].seconds)
    return jobs[key], runs[key]


def repeat(study: Study, folder: Path) -> Repeated:
    """Run the cheapest published run of a study again."""
    job, published = cheapest(study, folder)
    with TemporaryDirectory() as where:
        run_one(job.experiment, Path(where), lambda *_: None)
        again = read_run(job, Path(where))
    cpu = published.versions.get("cpu", "a processor that was not recorded")
    return Repeated(
        study.name, job.title, published.accuracy, again.accuracy, drift(published, again), again.seconds, cpu
    )


def drift(published: Run, again: Run) -> float:
    """The largest difference of any evaluated accuracy, in points; 0 if nothing differs but rounding."""
    pairs = [(published.accuracy[m], a) for m, a in again.accuracy.items() if m in published.accuracy]
    for measure in MEASURES:
        old = published.curves[measure]
        pairs += [(old[t], a) for t, a in again.curves[measure].items() if t in old]
    largest = max(abs(a - b) for a, b in pairs)
    return 0.0 if largest <= EXACT else 100 * largest
