"""`dsrun top`: how the ranks of running jobs fare, now or from second to second. Only shows."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import UsageError
from dsrun.units import format_bytes

from ..jobs.listing import Job, all_jobs, find_job, read_job
from ..jobs.live_status import WRITE_INTERVAL_S, LiveRank, read_live
from ..jobs.text import align, command_text, short_duration
from ..machine.gpus.usage import GpuUse, gpu_use_by_pid
from ..options.job_argument import job_argument

if TYPE_CHECKING:
    from rich.console import Group

_COORDINATE_HEADING = "COORDINATE"
_HEADING = ("HOST", "PID", "CPU", "RSS", "GPU MEM", "GPU", "STEP", "PHASE", "IDLE")
_STAGE_HEADING = ("STAGE", "BUBBLE")
_LAST_HEADING = "WAITS MOST IN"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """One rank, and what it does to the GPUs if they are this machine's."""

    live: LiveRank
    gpu: GpuUse | None


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


def ranks_of(job: Job) -> list[RankUse]:
    """Returns the ranks of a job that run, as they were seen last."""
    live = read_live(job.folder)
    if live is None:
        return []
    here = job.record.host == os.uname().nodename
    gpus = gpu_use_by_pid() if here else {}
    # Of ranks elsewhere the pid is another machine's.
    local = {job.record.host, "localhost"}
    return [
        RankUse(live=rank, gpu=gpus.get(rank.pid) if rank.pid is not None and rank.host in local else None)
        for rank in live.ranks
    ]


def heading(job: Job, ranks: Sequence[RankUse]) -> str:
    """Returns the line above a job's ranks."""
    stages = max((use.live.stages for use in ranks), default=0)
    share = max((use.live.schedule_wait for use in ranks), default=0.0)
    bubble = f"; {stages} stages, whose schedule has ranks wait {100 * share:.0f}% of a step" if stages > 1 else ""
    return f"job {job.id}: {job.state.value}, {command_text(job)}{bubble}"


def table_of(ranks: Sequence[RankUse]) -> list[tuple[str, ...]]:
    """Returns the heading and the rows of the table of a job's ranks; with stages, where there are several."""
    has_stages = any(use.live.stages > 1 for use in ranks)
    # Along one axis alone the rank's number says it.
    has_coordinates = any("," in use.live.coordinate for use in ranks)
    before, behind = (_COORDINATE_HEADING,) if has_coordinates else (), _STAGE_HEADING if has_stages else ()
    return [
        ("RANK", *before, *_HEADING, *behind, _LAST_HEADING),
        *(row(use, has_stages=has_stages, has_coordinates=has_coordinates) for use in ranks),
    ]


def row(use: RankUse, *, has_stages: bool = False, has_coordinates: bool = False) -> tuple[str, ...]:
    """Returns a rank's line.

    Args:
        use: the rank.
        has_stages: whether its pipeline stage and bubble are told.
        has_coordinates: whether its place on the axes of the job is told.
    """
    rank, gpu = use.live, use.gpu
    doing = rank.collective or rank.phase
    return (
        str(rank.rank),
        *((rank.coordinate or "-",) if has_coordinates else ()),
        rank.host,
        _or_dash(rank.pid),
        f"{rank.cpu_percent:.0f}%",
        format_bytes(rank.rss_bytes),
        "-" if gpu is None or gpu.memory_bytes is None else format_bytes(gpu.memory_bytes),
        "-" if gpu is None or gpu.percent is None else f"{gpu.percent}%",
        _or_dash(rank.step),
        doing or "-",
        "-" if rank.idle_s is None else short_duration(rank.idle_s),
        *(_stage(rank) if has_stages else ()),
        _longest_wait(rank),
    )


def _stage(rank: LiveRank) -> tuple[str, str]:
    """Returns a rank's stage, and the share of a step that it waits for others."""
    return (
        f"{rank.stage}/{rank.stages}" if rank.stages else "-",
        f"{100 * rank.stage_wait_s / rank.step_s:.0f}%" if rank.stages and rank.step_s else "-",
    )


def _longest_wait(rank: LiveRank) -> str:
    """Returns where a rank waits longest, and the share of a step that it does."""
    if not rank.longest_wait or not rank.step_s:
        return "-"
    return f"{100 * rank.longest_wait_s / rank.step_s:.0f}% {rank.longest_wait}"


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


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
