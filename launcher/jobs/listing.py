"""Which jobs there are on this machine, in what state, and which one a person means. Changes nothing.

Jobs are found in the state folder: those started with `--log-dir` by a link that stands for their folder there.
"""

from __future__ import annotations

import difflib
import enum
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import UsageError
from dsrun.units import format_names

from .folder import jobs_folder
from .lock import is_locked
from .record import JobRecord, read_outcome, read_record

#: Names the newest job.
LAST = "last"
_CLOSE_IDS = 3


class JobState(enum.Enum):
    """How a job is, in the words that people read."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    CRASHED = "crashed"
    #: There is an outcome that cannot be read: damaged, or of a later version.
    UNKNOWN = "unknown"

    @property
    def is_live(self) -> bool:
        """Its front end lives."""
        return self in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its folder shows it at one moment.

    Attributes:
        folder: folder of the job's files, with links resolved.
        record: record of what was asked for.
        state: state of the job at that moment, such as running, done or failed.
        outcome: result that `dsrun --json` printed at the job's end; None while the job runs, or if nothing readable
            was written.
    """

    folder: Path
    record: JobRecord
    state: JobState
    outcome: dict[str, Any] | None

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.id

    @property
    def exit_code(self) -> int | None:
        """What its front end exited with; None while it runs, or where nobody knows."""
        return None if self.outcome is None else self.outcome["exit_code"]

    @property
    def never_ran(self) -> bool:
        """Whether it has ended before a rank was started."""
        # Without the field it is an earlier version's, which wrote no attempt then.
        return self.outcome is not None and self.outcome.get("never_ran", self.outcome["attempts"] == 0)

    @property
    def ended(self) -> datetime | None:
        """When it ended; of a crashed job nobody knows."""
        return None if self.outcome is None else datetime.fromisoformat(self.outcome["ended"])


def read_job(folder: Path) -> Job | None:
    """Looks at one job; None where the folder holds no record."""
    record = read_record(folder)
    if record is None:
        return None
    # In this order: see [Note: job lock] in lock.
    locked = is_locked(folder)
    outcome = read_outcome(folder)
    if outcome is not None:
        state = JobState(outcome["outcome"])
    elif not locked:
        state = JobState.UNKNOWN if JobPaths(folder).outcome.exists() else JobState.CRASHED
    else:
        state = JobState.QUEUED if record.started is None else JobState.RUNNING
    return Job(folder=folder, record=record, state=state, outcome=outcome)


def all_jobs(environ: Mapping[str, str]) -> list[Job]:
    """Returns every job of the state folder, the newest first."""
    jobs = [read_job(folder) for folder in _folders(jobs_folder(environ))]
    return sorted((job for job in jobs if job is not None), key=lambda job: (job.record.created, job.id), reverse=True)


def job_ids(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of all jobs, the newest first, without looking into them."""
    return sorted((entry.name for entry in _entries(jobs_folder(environ))), reverse=True)


def find_job(name: str, environ: Mapping[str, str]) -> Job:
    """Finds the job that a person means.

    Args:
        name: an id, the beginning of one, the last four letters of one, or `last`.
        environ: environment variables; XDG_STATE_HOME or HOME says where the state folder is.

    Raises:
        UsageError: there is no such job, or several.
    """
    if name == LAST:
        jobs = all_jobs(environ)
        if not jobs:
            raise UsageError(f"there is no job in {jobs_folder(environ)}", hint="`dsrun train.py` starts one")
        return jobs[0]
    ids = job_ids(environ)
    matching = [name] if name in ids else [job_id for job_id in ids if job_id.startswith(name)]
    matching = matching or [job_id for job_id in ids if job_id.endswith(f"-{name}")]
    if not name or not matching:
        raise UsageError(f"there is no job `{name}` in {jobs_folder(environ)}", hint=_close_to(name, ids))
    if len(matching) > 1:
        shown = format_names(matching, _CLOSE_IDS)
        raise UsageError(f"`{name}` may be {shown}", hint="write more of the id, or its last four letters")
    folder = (jobs_folder(environ) / matching[0]).resolve()
    job = read_job(folder)
    if job is None:
        raise UsageError(
            f"job `{matching[0]}`: {folder} holds no record of a job that this dsrun can read",
            hint=f"if nothing of it is needed: `rm -r {shlex.quote(str(folder))}`",
        )
    return job


def _close_to(name: str, ids: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, ids, n=_CLOSE_IDS, cutoff=0.6)
    named = f"did you mean {' or '.join(f'`{job_id}`' for job_id in close)}? " if close else ""
    return f"{named}`dsrun ps --all` lists all jobs"


def _entries(parent: Path) -> list[os.DirEntry[str]]:
    """Folders, and links to folders that are still there.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        with os.scandir(parent) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"state folder {parent}: cannot be read: {(error.strerror or str(error)).lower()}",
            hint="XDG_STATE_HOME names another",
        ) from error


def _folders(parent: Path) -> list[Path]:
    return [Path(entry.path).resolve() for entry in _entries(parent)]
