"""`dsrun rm`: forgets jobs that have ended, with their logs. Ends none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timedelta

import click

from dsrun.errors import DsrunError, Problem, UsageError

from ..jobs.folder import remove_job
from ..jobs.listing import Job, all_jobs, find_job
from ..options.job_argument import job_argument
from ..options.types import parse_seconds


@click.command("rm")
@click.option(
    "--older-than", type=parse_seconds, metavar="AGE", help="All jobs that ended longer ago, like `30d` or `12h`."
)
@job_argument(nargs=-1, required=False)
def command(older_than: float | None, jobs: Sequence[str]) -> int:
    """Remove the folders of jobs that have ended: records, logs and all that is in them.

    Checkpoints are where the script wrote them, and stay. A job that runs or waits is refused.
    """
    if bool(jobs) == (older_than is not None):
        raise UsageError("name jobs, or an age with `--older-than`", hint="`dsrun rm --older-than 30d`")
    found = {job.id: job for job in (find_job(name, os.environ) for name in jobs)}
    if older_than is not None:
        before = datetime.now().astimezone() - timedelta(seconds=older_than)
        found = {job.id: job for job in all_jobs(os.environ) if _ended_before(job, before)}
    live = [job for job in found.values() if job.state.is_live]
    if live:
        raise UsageError.of(
            [Problem(f"job {job.id} is {job.state.value}", f"`dsrun stop {job.id}` ends it") for job in live]
        )
    problems = [problem for job in found.values() if (problem := _remove(job)) is not None]
    removed = len(found) - len(problems)
    click.echo(f"dsrun: {removed} job{'' if removed == 1 else 's'} removed", err=True)
    if problems:
        raise DsrunError.of(problems)
    return 0


def _ended_before(job: Job, moment: datetime) -> bool:
    # Of a crashed job only the beginning is known.
    return not job.state.is_live and (job.ended or job.record.created) < moment


def _remove(job: Job) -> Problem | None:
    try:
        remove_job(job.folder, os.environ)
    except OSError as error:
        return Problem(f"{error.filename or job.folder}: cannot be removed: {(error.strerror or str(error)).lower()}")
    return None
