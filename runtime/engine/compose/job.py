"""The job that a rank joins: its place there, and how it is heard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.contract.environment import RankInfo, stands_for_deepspeed
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.errors import InputError

from ...mesh.wait_times import WaitTimes
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
        InputError: a library of the script says something else than the job's environment.
    """
    _check_accelerate(RankInfo.from_env().world_size)
    info = join_job(dist_init_required=request.dist_init_required)
    return Job(info, request.heartbeat, say_once(info), WaitTimes(request.heartbeat))


def _check_accelerate(world_size: int) -> None:
    """Refuses a job whose ranks Accelerate takes for lone processes: each would train on the same samples.

    Without a GPU, Accelerate has no backend for DeepSpeed unless it is told that it is on a CPU; the Trainer of
    transformers counts by Accelerate.
    """
    module: Any = sys.modules.get("accelerate.state")
    state: Any = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    counted: Any = state.get("num_processes") if isinstance(state, Mapping) else None
    if stands_for_deepspeed() and counted is not None and counted != world_size:
        raise InputError(
            f"Accelerate counts {counted} process{'es' if counted != 1 else ''}, and the job has {world_size} ranks: "
            "each would train on the same samples",
            hint="on a machine without a GPU pass `--use_cpu` (TrainingArguments(use_cpu=True)), or call "
            "accelerate.PartialState(cpu=True) before Accelerator()",
        )
