"""A study that asks for more rounds extends its finished runs, and ends as if it had run them at once."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kilter.records.checksums import checksum
from kilter.study.extension import copy_run
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.pipeline import conduct
from kilter.study.runner import RunStatus, carry_out

EXPERIMENT: dict[str, Any] = {
    "data": "digits",
    "model": "linear",
    "clients": 3,
    "partition": "dirichlet:0.5",
    "rows": 300,
}
TUNED = {"method": "fedavg-tuned", "lr_schedule": "fedbe", "label": "tuned"}  # depends on the number of rounds


class RoundsSeen:
    """A watcher that keeps the rounds of each run."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[int]] = defaultdict(list)
        self.failures: list[str] = []

    def begin(self, jobs: Sequence[Job], done: int, at_once: int) -> None: ...
    def started(self, job: Job) -> None: ...
    def tick(self) -> None: ...

    def advanced(self, job: Job, status: RunStatus) -> None:
        self.rounds[job.label].append(status.round)

    def finished(self, job: Job, failure: str | None) -> None:
        self.failures += [failure] if failure else []


def study_of(rounds: int, methods: Sequence[Any] = ("fedavg",), **changes: Any) -> Study:
    values = {**EXPERIMENT, "rounds": rounds, **changes}
    return Study.of({"name": "s", "methods": [*methods], "seeds": 1, "experiment": values})


def rounds_of(path: Path, rounds: int, methods: Sequence[Any] = ("fedavg",), **changes: Any) -> dict[str, list[int]]:
    """Carry out a study of this many rounds; the rounds that were trained, by method."""
    seen = RoundsSeen()
    with Folder(path) as folder:
        carry_out(study_of(rounds, methods, **changes).jobs(), folder, 2, seen)
    assert not seen.failures
    return dict(seen.rounds)


def models(path: Path) -> dict[str, str]:
    """Checksums of the models and the records, by run and file."""
    files = [
        p for kind in ("model.safetensors", "best.safetensors", "clients.json") for p in path.glob(f"runs/*/{kind}")
    ]
    return {str(p.relative_to(path)): checksum(p.read_bytes()) for p in files}


def test_finished_runs_are_extended_to_the_bits_of_a_longer_study(tmp_path: Path) -> None:
    methods = ["fedavg", "scaffold", TUNED]
    rounds_of(tmp_path / "s", 2, methods)
    before = models(tmp_path / "s")
    seen = rounds_of(tmp_path / "s", 4, methods)
    assert seen == {"fedavg": [3, 4], "scaffold": [3, 4], "tuned": [0, 1, 2, 3, 4]}
    rounds_of(tmp_path / "at once", 4, methods)
    assert models(tmp_path / "s") == before | models(tmp_path / "at once")  # the shorter runs are still there
    assert rounds_of(tmp_path / "s", 2, methods) == {}
    assert rounds_of(tmp_path / "s", 5, methods)["fedavg"] == [5]  # the longest is extended


@pytest.mark.parametrize("left", ["part", "all but the checkpoint"])
def test_a_copy_that_was_interrupted_is_made_again(left: str, tmp_path: Path) -> None:
    rounds_of(tmp_path / "s", 1, ["scaffold"])
    rounds_of(tmp_path / "at once", 2, ["scaffold"])
    (source,) = (tmp_path / "s" / "runs").iterdir()
    (name,) = (p.name for p in (tmp_path / "at once" / "runs").iterdir())
    target = tmp_path / "s" / "runs" / name
    copy_run(source, target)
    (target / "checkpoint.safetensors").unlink()
    if left == "part":
        shutil.rmtree(target / "nodes")
        (target / "rounds.jsonl").write_text("{")
    assert rounds_of(tmp_path / "s", 2, ["scaffold"]) == {"scaffold": [2]}
    assert models(tmp_path / "s").items() >= models(tmp_path / "at once").items()


@pytest.mark.parametrize("damage", ["model.safetensors", "experiment.toml", "summary.json"])
def test_a_damaged_run_is_not_extended(damage: str, tmp_path: Path) -> None:
    rounds_of(tmp_path, 1)
    (source,) = (tmp_path / "runs").iterdir()
    (source / damage).write_text("damaged")
    assert rounds_of(tmp_path, 2) == {"fedavg": [0, 1, 2]}


def test_other_settings_and_runs_that_stopped_early_start_again(tmp_path: Path) -> None:
    rounds_of(tmp_path, 1)
    assert rounds_of(tmp_path, 2, lr=0.02) == {"fedavg": [0, 1, 2]}
    early = {"patience": 1, "lr": 1e-9}
    assert rounds_of(tmp_path, 4, **early) == {"fedavg": [0, 1, 2]}
    assert rounds_of(tmp_path, 5, **early) == {"fedavg": [0, 1, 2]}


def test_results_say_that_other_versions_ran_the_first_rounds(tmp_path: Path) -> None:
    rounds_of(tmp_path, 1)
    (file,) = tmp_path.glob("runs/*/experiment.toml")
    text = re.sub('torch = ".*"', 'torch = "2.5.1"', file.read_text())
    file.write_text(text)
    assert rounds_of(tmp_path, 2) == {"fedavg": [2]}
    with Folder(tmp_path) as folder:
        results = conduct(study_of(2), folder, 1, Console(quiet=True))
    assert [note for note in results.notes if "than they began with" in note]
    (run,) = results.cells[0].lines[0].runs
    assert run.versions["began with"] == "torch 2.5.1"


OWN = """
from kilter.methods.fedavg import FedAvg

class Own(FedAvg):
    \"\"\"FedAvg.\"\"\"
"""


def test_a_method_that_was_edited_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    methods = [{"method": f"{file}:Own", "label": "own"}]
    rounds_of(tmp_path / "s", 1, methods)
    assert rounds_of(tmp_path / "s", 2, methods) == {"own": [2]}
    file.write_text(OWN + "# edited\n")
    assert rounds_of(tmp_path / "s", 3, methods) == {"own": [0, 1, 2, 3]}
