"""The job that a rank joins: its place there, and how it is heard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsrun.contract.environment import RankInfo
from dsrun.contract.heartbeats import HeartbeatWriter

from ...mesh.wait_times import WaitTimes
from .arguments import check_parallelism
from .distributed import join_job
from .request import Request
from .start_report import say_once


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in the job.

    Attributes:
        info: Rank, local rank and sizes.
        heartbeat: Writer of what this rank does, for the launcher that watches it.
        say: Function that prints a line once for the whole job: on the first rank.
        waits: Seconds that this rank has waited for others; it tells the heartbeat of each wait.
    """

    info: RankInfo
    heartbeat: HeartbeatWriter
    say: Callable[[str], None]
    waits: WaitTimes


def join(request: Request) -> Job:
    """Joins the job's process group, unless that has happened.

    Raises:
        InputError: an argument says something else than the job's environment.
    """
    info = join_job(dist_init_required=request.dist_init_required)
    check_parallelism(request.mpu, request.mesh_param, world_size=info.world_size)
    return Job(info, request.heartbeat, say_once(info), WaitTimes(request.heartbeat))
