"""A study that asks for more rounds than before extends its finished runs, which gives the bits of uninterrupted ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.records import checksums
from kilter.records.run_folder import CHECKPOINT, read_summary, write
from kilter.study.grid import run_name

OF_THE_END = {"summary.json", checksums.FILE, ".lock", "output.txt", "error.txt"}  # not for a run that goes on


def shorter_run(experiment: Experiment, folder: Path) -> Path | None:
    """Of the finished and undamaged runs next to `folder` that differ from this one only in fewer rounds, the longest."""
    shorter: dict[int, Path] = {}
    for path in sorted(folder.parent.glob("*/summary.json")):
        try:
            other, summary = Experiment.read(path.with_name("experiment.toml")), read_summary(path.parent)
            if other.rounds >= experiment.rounds or replace(other, rounds=experiment.rounds) != experiment:
                continue
            if run_name(other) != path.parent.name:  # a file that it read has changed since
                continue
            for name in checksums.read(path.parent):
                checksums.verify(path.parent, name, (path.parent / name).read_bytes())
        except (Mistake, OSError):  # damaged, or from another version
            continue
        if summary.outcome == "trained" and not summary.stopped_early:
            shorter[other.rounds] = path.parent
    return shorter[max(shorter)] if shorter else None


def copy_run(source: Path, target: Path) -> None:
    """Copy a finished run so that it can go on. The checkpoint comes last: a copy without one is made again."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_file() and str(name) not in OF_THE_END | {CHECKPOINT}:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
    write(target / CHECKPOINT, (source / CHECKPOINT).read_bytes())
