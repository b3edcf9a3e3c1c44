"""`dsrun ps`: which jobs there are and how they fare. Only shows."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta

import click

from ..jobs.folder import jobs_folder
from ..jobs.listing import Job, all_jobs, job_ids
from ..jobs.progress import last_step
from ..jobs.text import job_json, job_table, terminal_columns

#: Those that ended overnight are still shown to whoever comes in the morning.
_RECENT = timedelta(hours=24)
_SHOWN_STRANGE = 3


@click.command("ps")
@click.option("-a", "--all", "show_all", is_flag=True, help="Those that ended more than a day ago too.")
@click.option("-w", "--wide", is_flag=True, help="Whole commands, on a narrow terminal too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(show_all: bool, wide: bool, as_json: bool) -> int:
    """List jobs that run or wait, and those of the last day.

    \b
    State:
      queued   waits for its devices
      running  its front end lives
      done     every rank ended well
      failed   see `dsrun show JOB` for the cause
      stopped  a person ended it; TOOK is - where no rank had begun
      crashed  its front end was killed; its ranks have ended with it
      unknown  its outcome.json is damaged, or of a later version
    """
    now = datetime.now().astimezone()
    everything = all_jobs(os.environ)
    jobs = [(job, last_step(job.folder)) for job in everything if show_all or _is_recent(job, now)]
    if as_json:
        body = {"schema_version": 1, "jobs": [job_json(job, step=step, now=now) for job, step in jobs]}
        click.echo(json.dumps(body, indent=2))
        return 0
    if jobs:
        click.echo("\n".join(job_table(jobs, now=now, columns=None if wide else terminal_columns())))
    hidden = len(everything) - len(jobs)
    if hidden:
        click.echo(f"dsrun: {hidden} older job{'s' if hidden > 1 else ''} with `dsrun ps --all`", err=True)
    elif not jobs:
        click.echo(f"dsrun: no jobs in {jobs_folder(os.environ)}", err=True)
    known = {job.folder.name for job in everything}
    strange = [name for name in job_ids(os.environ) if name not in known] if show_all else []
    if strange:
        shown = ", ".join(strange[:_SHOWN_STRANGE]) + (", ..." if len(strange) > _SHOWN_STRANGE else "")
        click.echo(f"dsrun: in {jobs_folder(os.environ)} without a record this dsrun can read: {shown}", err=True)
    return 0


def _is_recent(job: Job, now: datetime) -> bool:
    return job.state.is_live or now - (job.ended or job.record.created) <= _RECENT
