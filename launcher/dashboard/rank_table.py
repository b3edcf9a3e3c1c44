"""Ranks of a running job as rows: what each does, and what it does to this machine's GPUs. Only shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.units import format_bytes

from ..jobs.listing import Job
from ..jobs.live_status import LiveRank, read_live
from ..jobs.text import command_text, short_duration
from ..machine.gpus.usage import GpuUse, gpu_use_by_pid

_COORDINATE_HEADING = "COORDINATE"
_HEADING = ("HOST", "PID", "CPU", "RSS", "GPU MEM", "GPU", "STEP", "PHASE", "IDLE")
_STAGE_HEADING = ("STAGE", "BUBBLE")
_LAST_HEADING = "WAITS MOST IN"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """One rank, and what it does to the GPUs if they are this machine's."""

    live: LiveRank
    gpu: GpuUse | None


def ranks_of(job: Job, *, with_gpus: bool = True) -> list[RankUse]:
    """Returns the ranks of a job that run, as they were seen last.

    Args:
        job: job to look at.
        with_gpus: whether the driver is asked what they do to this machine's GPUs.
    """
    live = read_live(job.folder)
    if live is None:
        return []
    here = job.record.host == os.uname().nodename
    gpus = gpu_use_by_pid() if here and with_gpus else {}
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


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
