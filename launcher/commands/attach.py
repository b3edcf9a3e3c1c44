"""`dsrun attach`: a job in the background seen as if it ran in the foreground; leaving it does not end it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import click

from dsrun.errors import LaunchError

from ..jobs.front_end_process import front_end_of
from ..jobs.listing import Job, JobState, find_job, read_job
from ..jobs.progress import Activity, doing_now
from ..options.job_argument import job_argument
from ..run.outcome_text import closing
from ._follow_log import LogView, until_its_end

#: What a shell reports for Ctrl-C.
_LEFT_EXIT = 130


@click.command("attach")
@click.option("--ranks", metavar="RANKS", help="Lines of these ranks only, like `0,8-11`.")
@job_argument()
def command(ranks: str | None, job: str) -> int:
    """Follow a job from now to its end, and exit as it does.

    Ctrl-C leaves: the job goes on, and the exit code is 130. `dsrun logs JOB` has what came before.
    """
    found = find_job(job, os.environ)
    view = LogView(found, ranks=ranks, split=True)
    now_s = time.time()
    if found.state.is_live:
        doing = doing_now(found.folder)
        view.note(f"job {found.id}: attached, {doing.text}; Ctrl-C leaves it, `dsrun stop {found.id}` ends it")
        try:
            with front_end_of(found.record) as front_end:
                goes_on = until_its_end(found, front_end)
                follow = _telling(found, view, goes_on, doing) if doing.is_before_start else goes_on
                view.show(since_s=now_s, follow=follow)
        except KeyboardInterrupt:
            if os.isatty(2):
                # The terminal has written `^C` where the cursor was.
                click.echo(err=True)
            view.note(f"job {found.id}: left; it goes on")
            return _LEFT_EXIT
    return _end_of(found, view)


def _telling(job: Job, view: LogView, goes_on: Callable[[], bool], doing: Activity) -> Callable[[], bool]:
    """Returns `goes_on` that also says what a job waits for, whenever that changes, until it has ranks."""
    told = doing

    def look() -> bool:
        nonlocal told
        is_going = goes_on()
        if is_going and told.is_before_start and (now := doing_now(job.folder)) != told:
            told = now
            view.note(f"job {job.id}: {now.text}")
        return is_going

    return look


def _end_of(job: Job, view: LogView) -> int:
    """Says how the job ended, as its own front end would; returns the job's exit code."""
    ended = read_job(job.folder)
    if ended is None or ended.outcome is None:
        crashed = ended is None or ended.state is JobState.CRASHED
        reason = "its front end was killed" if crashed else "how it ended is not known: outcome.json cannot be read"
        raise LaunchError(f"job {job.id}: {reason}", hint=f"`dsrun logs {job.id}` has what came last")
    outcome = ended.outcome
    if not job.state.is_live:
        view.note(f"job {job.id} had ended already; `dsrun logs {job.id}` has its lines")
    if outcome["failure"] is not None:
        view.report(outcome["failure"])
    view.note(closing(outcome))
    return int(outcome["exit_code"])
