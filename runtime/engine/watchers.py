"""What looks at a run step by step and changes nothing of it: made as the config and the launch ask for it."""

from __future__ import annotations

from typing import Protocol

from dsrun.config.config import Config

from ..mesh.comms_log import log_of
from ..mesh.join.groups import ProcessGroupMesh
from ..observe.comms_report import CommsReport
from ..observe.memory_breakdown import MemoryBreakdown
from ..observe.memory_watch import Kinds
from ..observe.trace import wanted_trace
from .compose.job import Job
from .update import Update


class StepWatcher(Protocol):
    """Who is told of each optimizer step, on every rank, and of the end of the engine."""

    def end_step(self, step: int) -> None:
        """An optimizer step is over; steps count from 1."""
        ...

    def close(self) -> None:
        """No step follows; a second call does nothing."""
        ...


def make_watchers(
    settings: Config, job: Job, mesh: ProcessGroupMesh, update: Update, *, kinds: Kinds
) -> tuple[StepWatcher, ...]:
    """Returns what looks at the steps of an engine.

    Args:
        settings: the config.
        job: this process's place in the job.
        mesh: ranks and device.
        update: the optimizer; an engine without one takes no step.
        kinds: function that returns names and bytes of what is held for long on the device.
    """
    log = log_of(mesh)
    watchers: list[StepWatcher] = [] if log is None else [CommsReport(log, tells=mesh.is_first)]
    if settings.memory_breakdown and mesh.is_first:
        watchers.append(MemoryBreakdown(mesh.device, kinds))
    if update.optimizer is not None:
        trace = wanted_trace(rank=mesh.info.rank, device=mesh.device, waits=job.waits)
        watchers += [] if trace is None else [trace]
    return tuple(watchers)
