"""`dsrun watch`: a page about one job, drawn as it trains, or a line every so often. Only shows."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

import click

from dsrun.errors import UsageError

from ..console.printer import wants_colour
from ..dashboard.run_view import RunWatcher
from ..jobs.folder import jobs_folder
from ..jobs.listing import Job, JobState, all_jobs, find_job
from ..options.job_argument import job_argument
from ..options.types import parse_duration
from ..run.outcome_text import closing
from ._follow_log import hosts_by_rank

if TYPE_CHECKING:
    from rich.console import Console

#: Between two looks at a job of which a line is printed.
_LOOK_S = 0.5
#: Rows of a page that is printed once and no terminal limits.
_PAGE_LINES = 40


@click.command("watch")
@click.option("--once", is_flag=True, help="Draw one page and leave.")
@click.option("--every", type=parse_duration, metavar="TIME", help="Print a line so often, and no page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, once.")
@job_argument(required=False)
def command(once: bool, every: float | None, as_json: bool, job: str | None) -> int:
    """Watch a job train: loss, speed, memory, slow ranks, events.

    Without JOB it is the newest one that runs, else the newest one. The page ends with the job. `q` or Ctrl-C leaves
    it, and the job goes on; `l` shows the last lines of the log. Where stdout is no terminal that can draw, there is a
    line every 30s.
    """
    found = _job_to_watch(job)
    watcher = RunWatcher(found, hosts_by_rank(found))
    if as_json:
        from ..dashboard.run_text import view_json

        watcher.look(at_once=True)
        click.echo(json.dumps(view_json(watcher.view()), indent=2))
    elif once:
        from ..dashboard.live_page import show_page

        watcher.look(at_once=True)
        show_page(_console(), watcher, lines=None if sys.stdout.isatty() else _PAGE_LINES)
    elif every is not None or not _can_draw():
        try:
            _print_lines(watcher, 30.0 if every is None else every)
        except KeyboardInterrupt:
            return 0
        _tell_end(watcher.job)
    else:
        from ..dashboard.live_page import follow_page

        if follow_page(_console(), watcher):
            _tell_end(watcher.job)
        else:
            click.echo(f"dsrun: job {found.id}: left; it goes on", err=True)
    return 0


def _job_to_watch(name: str | None) -> Job:
    """Returns the job that a person means, and says which where they have not named one.

    Raises:
        UsageError: there is none.
    """
    if name is not None:
        return find_job(name, os.environ)
    jobs = all_jobs(os.environ)
    if not jobs:
        raise UsageError(f"there is no job in {jobs_folder(os.environ)}", hint="`dsrun train.py` starts one")
    job = next((one for one in jobs if one.state.is_live), jobs[0])
    others = sum(one.state.is_live for one in jobs) - 1
    which = "no job runs; the newest one" if not job.state.is_live else "the newest job that runs"
    more = f"; {others} more run, see `dsrun ps`" if others > 0 else ""
    click.echo(f"dsrun: job {job.id}: {which}{more}", err=True)
    return job


def _can_draw() -> bool:
    # As rich has it: what has one of these names moves no cursor.
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _console() -> Console:
    from rich.console import Console

    colour = wants_colour(os.environ, is_terminal=sys.stdout.isatty())
    return Console(no_color=not colour, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _print_lines(watcher: RunWatcher, every_s: float) -> None:
    """Prints a line so often until the job has ended, and one at its end."""
    from ..dashboard.run_text import line_of

    next_s = time.monotonic()
    while True:
        watcher.look(at_once=True)
        is_over = not watcher.job.state.is_live
        if is_over or time.monotonic() >= next_s:
            click.echo(line_of(watcher.view()))
            next_s = time.monotonic() + every_s
        if is_over:
            return
        time.sleep(min(_LOOK_S, every_s))


def _tell_end(job: Job) -> None:
    """Says how the job ended, as its own front end did."""
    if job.outcome is not None:
        how = closing(job.outcome)
    elif job.state is JobState.CRASHED:
        how = f"job {job.id}: its front end was killed"
    else:
        how = f"job {job.id}: how it ended is not known: outcome.json cannot be read"
    click.echo(f"dsrun: {how}", err=True)
