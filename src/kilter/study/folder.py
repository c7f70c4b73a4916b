"""A study's folder: study.toml, the runs, and the results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from kilter.errors import Mistake
from kilter.records.lock import hold
from kilter.records.run_folder import cannot_write, read_summary
from kilter.study.grid import Job

PATIENCE = 20.0  # seconds to wait until the processes of a killed study end


class Folder:
    """A study's folder, locked by one study at a time. Processes that a killed study left behind hold the lock too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise Mistake(f"'{path}' is a file: choose another folder with --out.")
        if (path / "experiment.toml").exists():
            raise Mistake(f"'{path}' holds a single run: choose another folder with --out.")
        is_study = (path / "study.toml").exists() or (path / ".lock").exists()
        if path.is_dir() and any(path.iterdir()) and not is_study:
            raise Mistake(f"'{path}' is not empty and is not a study's folder: choose another with --out.")
        try:
            (path / "runs").mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115 - held as long as the study runs
        except OSError as e:
            raise cannot_write(path, e) from None

    def __enter__(self) -> Self:
        until = time.monotonic() + PATIENCE
        while not hold(self._lock):
            if time.monotonic() > until:
                raise Mistake(f"Another study is running in '{self.path}': wait for it, or choose another --out.")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def run(self, job: Job) -> Path:
        """The run folder of a job."""
        return self.path / "runs" / job.folder

    def is_done(self, job: Job) -> bool:
        """Whether a job's run is finished and trained something. summary.json is the last file a run writes."""
        folder = self.run(job)
        return (folder / "summary.json").exists() and read_summary(folder).outcome == "trained"
