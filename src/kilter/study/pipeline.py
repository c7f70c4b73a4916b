"""A whole study: tune, run what is missing, gather the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tomli_w
from rich.console import Console

from kilter.records.run_folder import write
from kilter.records.versions import commit
from kilter.study import tuning
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.progress import StudyProgress
from kilter.study.results import Results, gather
from kilter.study.runner import FailedRun, Watcher, carry_out


class CarryOut(Protocol):
    """Runs the jobs that are not done yet, here or elsewhere; the runs that failed."""

    def __call__(self, jobs: Sequence[Job], folder: Folder, at_once: int, watcher: Watcher) -> list[FailedRun]: ...


def conduct(study: Study, folder: Folder, at_once: int, console: Console, run: CarryOut = carry_out) -> Results:
    """Run what is missing of a study in its folder, which the caller has locked; `run` carries out the runs."""
    trials = tuning.trials(study)
    commit()  # read now and inherited by the runs: files may change while a study runs, its code does not
    write(folder.path / "study.toml", tomli_w.dumps(_plain(study.source)))
    failures = []
    if trials:
        with StudyProgress(console, f"{study.name}: tuning") as progress:
            failures += run(trials, folder, at_once, progress)
    choices = tuning.choose(study, trials, folder)
    jobs = study.jobs({key: choice.settings for key, choice in choices.items()})
    with StudyProgress(console, study.name) as progress:
        failures += run(jobs, folder, at_once, progress)
    return gather(study, folder, jobs, failures, choices, tuning.budget(study) if choices else 0)


def _plain(values: Any) -> Any:
    """Tuples and paths as TOML has them."""
    if isinstance(values, dict):
        return {k: _plain(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(v) for v in values]
    return values if isinstance(values, str | int | float | bool) else str(values)
