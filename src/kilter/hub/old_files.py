"""Delete the files of jobs that ended long ago. The jobs stay in the queue; audit logs are at the sites and stay there."""

from __future__ import annotations

import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kilter.hub.job_queue import ACTIVE, JobQueue, QueuedJob, timestamp

log = logging.getLogger("kilter.net")


def expired_folders(queue: JobQueue, jobs: Path, days: float, now: datetime | None = None) -> list[Path]:
    """The folders of jobs that ended more than `days` days ago; `days` = 0: none. Folders that the queue does not know stay."""
    if days == 0 or not jobs.is_dir():
        return []
    limit = timestamp((now or datetime.now(UTC)) - timedelta(days=days))
    folders = [path for path in jobs.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(path for path in folders if _ended_before(queue, int(path.name), limit))


def _ended_before(queue: JobQueue, number: int, limit: str) -> bool:
    """Whether a job ended before a moment. A study and its runs expire together, when the last of them has expired."""
    job = queue.get(number)
    if job is None:
        return False
    study = queue.get(job.parent) if job.parent else job
    family = [job, *([study, *queue.runs_of(study.id)] if study else [])]
    return all(each.state not in ACTIVE and each.ended < limit for each in family)


def delete(folder: Path) -> None:
    """Delete the folder of a job; what cannot be deleted is logged, and tried again at the next sweep."""
    try:
        shutil.rmtree(folder)
        log.info("the files of job %s are deleted", folder.name)
    except OSError as e:
        log.warning("the files of job %s cannot be deleted: %s", folder.name, e)


def files_deleted(job: QueuedJob, folder: Path) -> bool:
    """Whether a job ran and is over, but its folder is gone."""
    return job.state not in ACTIVE and job.started != "" and not folder.exists()
