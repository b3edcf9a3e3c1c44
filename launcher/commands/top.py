"""`dsrun top`: how the ranks of running jobs fare, now or from second to second. Only shows."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import UsageError

from ..dashboard.rank_table import RankUse, heading, ranks_of, table_of
from ..jobs.listing import Job, all_jobs, find_job, read_job
from ..jobs.live_status import WRITE_INTERVAL_S
from ..jobs.text import align
from ..options.job_argument import job_argument

if TYPE_CHECKING:
    from rich.console import Group


@click.command("top")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, once.")
@job_argument(required=False)
def command(as_json: bool, job: str | None) -> int:
    """Show each rank's processor, memory, GPU, step and phase, live on a terminal; without JOB for all that run.

    A rank that has ended is not listed. Idle is the time since the rank last told of progress, if it tells of any. GPU
    is how busy the rank's busiest GPU is. The last column is the share of a step that a rank waits in the collective
    that it waits in longest. Of a pipeline, STAGE is the rank's stage, and BUBBLE the share of a step that it waits for
    other stages. Where several axes divide the ranks, COORDINATE is the rank's place on them. Ctrl-C leaves.
    """
    jobs = (
        [find_job(job, os.environ)] if job is not None else [one for one in all_jobs(os.environ) if one.state.is_live]
    )
    if job is not None and not jobs[0].state.is_live:
        raise UsageError(f"job {jobs[0].id} has ended: {jobs[0].state.value}", hint=f"`dsrun show {jobs[0].id}`")
    if as_json:
        body = {"schema_version": 1, "jobs": [_json(one, ranks_of(one)) for one in jobs]}
        click.echo(json.dumps(body, indent=2))
    elif not jobs:
        click.echo("dsrun: no job runs", err=True)
    elif sys.stdout.isatty():
        _live(jobs)
    else:
        for one in jobs:
            ranks = ranks_of(one)
            click.echo("\n".join([heading(one, ranks), *align(table_of(ranks))]))
    return 0


def _live(jobs: Sequence[Job]) -> None:
    """Draws anew every second until the jobs have ended."""
    from rich.live import Live

    running = list(jobs)
    try:
        with Live(_drawing(running), auto_refresh=False, screen=False) as live:
            while running:
                time.sleep(WRITE_INTERVAL_S)
                now = [read_job(one.folder) for one in running]
                running = [one for one in now if one is not None and one.state.is_live]
                if running:
                    live.update(_drawing(running), refresh=True)
    except KeyboardInterrupt:
        # The way to leave.
        return


def _drawing(jobs: Sequence[Job]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Text | Table] = []
    for job in jobs:
        ranks = ranks_of(job)
        names, *rows = table_of(ranks)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for cells in rows:
            table.add_row(*map(Text, cells))
        parts += [Text(heading(job, ranks), style="bold", no_wrap=True, overflow="ellipsis"), table]
    return Group(*parts)


def _json(job: Job, ranks: Sequence[RankUse]) -> dict[str, Any]:
    return {
        "id": job.id,
        "state": job.state.value,
        "ranks": [{**asdict(use.live), "gpu": None if use.gpu is None else asdict(use.gpu)} for use in ranks],
    }
