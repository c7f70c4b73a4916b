"""Small finished runs for tests of reports."""

from __future__ import annotations

from pathlib import Path

from kilter.experiment import Experiment
from kilter.records.run_folder import Store, write

SMALL = {"data": "digits", "rows": 300, "clients": 4, "rounds": 2, "model": "linear", "local": {"epochs": 1}}


def run(folder: Path, method: str, **settings: object) -> Path:
    """Run a small experiment into a folder."""
    experiment = Experiment.of({**SMALL, "method": method, **settings})
    built, fed = experiment.build()
    store = Store(folder)
    with fed:
        write(folder / "experiment.toml", experiment.write())
        experiment.run(built, fed, store)
    store.close()
    return folder
