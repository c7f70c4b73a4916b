"""Repeat one cheap run of a published study on this machine, and compare it with the published one.

Accuracies of few test rows can agree where models do not, so training losses are compared, too. Of a long run only the first rounds
are repeated, which are those of a shorter run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.study.grid import Job, Study
from kilter.study.results import Run, read_run
from kilter.study.runner import PreloadedExperiment, run_one
from kilter.study.schema import MEASURES
from kilter.study.stored import as_run

EXACT = 5.01e-7  # results.json rounds curves to six digits
SECONDS = 60.0  # longer runs are repeated up to the round that they reached in this time


@dataclass(frozen=True)
class Repeated:
    """A published run and how far a repetition is from it."""

    study: str  # its name and preset
    title: str
    rounds: tuple[int, int]  # repeated, of the published run
    drift: float  # largest difference of any evaluated accuracy, in points
    loss_drift: (
        float | None
    )  # largest difference of the training loss in any round; None: results of version 0.1 have none
    seconds: float
    machine: str  # of the published run

    @property
    def is_same(self) -> bool:
        return self.drift == 0 and not self.loss_drift

    def __str__(self) -> str:
        words = "same bits" if self.loss_drift is not None else "same accuracies, and no published losses to compare"
        if self.drift:
            words = f"differs by up to {self.drift:.2f} points"
        elif self.loss_drift:
            words = f"same accuracies, training losses differ by up to {self.loss_drift:.1e}"
        some, whole = self.rounds
        words += f" in the first {some} of {whole} rounds" if some < whole else ""
        return f"{self.study}: {words}  ({self.title}; {self.seconds:.0f} s; published on {self.machine})"


def cheapest(study: Study, folder: Path) -> tuple[Job, Run]:
    """The published run that took the least time and sent something, so that it is not the baseline of training alone."""
    stored = json.loads((folder / "results.json").read_text())
    lines = stored["lines"]
    runs = {(line["cell"], line["method"], r["seed"]): as_run(r) for line in lines for r in line["runs"]}
    tuned = {(choice["cell"], choice["label"]): choice["settings"] for choice in stored["tuning"]}
    jobs = {(job.cell.name, job.label, job.seed): job for job in study.jobs(tuned)}
    known = [key for key in jobs if key in runs and any(runs[key].spent.values())]
    if not known:
        raise Mistake(f"The study file has none of the runs in '{folder}': it was changed since.")
    key = min(known, key=lambda k: runs[k].seconds)
    return jobs[key], runs[key]


def repeat(study: Study, folder: Path, seconds: float = SECONDS) -> Repeated:
    """Run the cheapest published run of a study again, or as many of its rounds as it published in so many seconds."""
    job, published = cheapest(study, folder)
    whole, some = job.experiment.rounds, affordable(job.experiment, published.seconds, seconds)
    with TemporaryDirectory() as where:
        run_one(replace(job.experiment, rounds=some), Path(where), lambda *_: None)
        again = read_run(job, Path(where))
    if some < whole:  # its last evaluation is more thorough than that of a round in the middle
        again = replace(
            again, accuracy={}, curves={m: before(some, c) if m != "loss" else c for m, c in again.curves.items()}
        )
    return Repeated(
        f"{study.name}, {study.preset}" if study.preset else study.name,
        job.title,
        (some, whole),
        drift(published, again),
        loss_drift(published, again),
        again.seconds,
        published.versions.get("cpu", "a processor that was not recorded"),
    )


def affordable(experiment: Experiment, published: float, seconds: float) -> int:
    """How many rounds to repeat of a run that took `published` seconds: at least up to the first evaluation, and one more."""
    if published <= seconds:
        return experiment.rounds
    method, fed = PreloadedExperiment(**vars(experiment)).build(workers=1)
    with fed:
        if method.depends_on_rounds():
            return experiment.rounds
    rounds = max(math.floor(experiment.rounds * seconds / published), experiment.evaluate_every + 1)
    return min(rounds, experiment.rounds)


def before(round: int, curve: dict[int, float]) -> dict[int, float]:
    return {t: value for t, value in curve.items() if t < round}


def drift(published: Run, again: Run) -> float:
    """The largest difference of any evaluated accuracy, in points; 0 if nothing differs but rounding."""
    pairs = [(published.accuracy[m], a) for m, a in again.accuracy.items() if m in published.accuracy]
    for measure in MEASURES:
        old = published.curves[measure]
        pairs += [(old[t], a) for t, a in again.curves[measure].items() if t in old]
    largest = max(abs(a - b) for a, b in pairs)
    return 0.0 if largest <= EXACT else 100 * largest


def loss_drift(published: Run, again: Run) -> float | None:
    """The largest difference of the training loss in any round; None if no losses were published."""
    old, new = published.curves["loss"], again.curves["loss"]
    if not old:
        return None
    largest = max((abs(old[t] - new[t]) for t in old.keys() & new.keys()), default=0.0)
    return 0.0 if largest <= EXACT else largest
