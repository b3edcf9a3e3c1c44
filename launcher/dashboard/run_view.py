"""All that is known of one job at a moment, for a page, a line, an object or metrics. Looks and draws nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsrun.contract.job_paths import JobPaths

from ..jobs.facts import memory_sizes
from ..jobs.listing import Job, JobState, read_job
from ..jobs.progress import doing_now
from ..machine.gpus.usage import GpuNow, gpus_now
from .job_events import JobEvent, JobEvents
from .rank_table import RankUse, ranks_of
from .run_figures import RunFigures

#: Between two looks at what changes slowly: the job's own files, its ranks and the driver of the GPUs.
_SLOW_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One job at one moment.

    Attributes:
        job: the job as its folder shows it.
        figures: newest figures of its records.
        events: events of the job, the newest last.
        restarts: times it was started again.
        ranks: ranks that run, as their hosts last saw them.
        hosts: host of each rank, by rank.
        gpus: GPUs of this machine, where the job's front end runs on it.
        memory_total: bytes of a device by tier, as far as they are known.
        doing: words for what the job waits for or how many of its ranks run, where it has taken no step.
        now_s: seconds since the epoch.
    """

    job: Job
    figures: RunFigures
    events: Sequence[JobEvent]
    restarts: int
    ranks: Sequence[RankUse]
    hosts: Sequence[str]
    gpus: Sequence[GpuNow]
    memory_total: Mapping[str, int]
    doing: str
    now_s: float

    def host_of(self, rank: int) -> str:
        """Returns the host of a rank; empty where it is not known."""
        return self.hosts[rank] if rank < len(self.hosts) else ""


class RunWatcher:
    """Follows one job; every look takes what is new and no more.

    Args:
        job: Job to follow.
        hosts: Host of each rank, by rank.
        with_gpus: Whether the driver is asked for this machine's GPUs.
        clock: Function that returns seconds and never goes back.
    """

    def __init__(
        self,
        job: Job,
        hosts: Sequence[str],
        *,
        with_gpus: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._hosts = hosts
        self._clock = clock
        self._figures = RunFigures(job.folder, clock=clock)
        self._events = JobEvents(job.folder)
        self._memory_total: Mapping[str, int] | None = None
        self._ranks: Sequence[RankUse] = ()
        self._gpus: Sequence[GpuNow] = ()
        self._asks_gpus = with_gpus and job.record.host == os.uname().nodename
        self._doing = ""
        self._next_look_s = -1.0

    @property
    def job(self) -> Job:
        """The job as it was seen last."""
        return self._job

    @property
    def figures(self) -> RunFigures:
        """Figures of the records that were read so far."""
        return self._figures

    def look(self, *, budget_s: float = float("inf"), at_once: bool = False) -> bool:
        """Takes what is new; returns whether a page would show it.

        Args:
            budget_s: seconds after which records are left to the next look.
            at_once: whether to look too at what changes slowly.

        Raises:
            OSError: the job's files cannot be read.
        """
        is_slow_look = at_once or self._clock() >= self._next_look_s
        if is_slow_look:
            self._look_slowly()
            self._next_look_s = self._clock() + _SLOW_LOOK_S
        # After the state: what a job wrote before it ended is then on its last page.
        has_steps = self._figures.read(budget_s=budget_s)
        return self._events.read() or has_steps or is_slow_look

    def view(self, *, now_s: float | None = None) -> RunView:
        """Returns what was seen last.

        Args:
            now_s: present time in seconds since the epoch; None to ask the clock.
        """
        return RunView(
            job=self._job,
            figures=self._figures,
            events=tuple(self._events.recent),
            restarts=self._events.restarts,
            ranks=self._ranks,
            hosts=self._hosts,
            gpus=self._gpus,
            memory_total=self._memory_total or {},
            doing=self._doing,
            now_s=time.time() if now_s is None else now_s,
        )

    def _look_slowly(self) -> None:
        # A folder that was removed leaves what was seen last, but for how the job is.
        self._job = read_job(self._job.folder) or replace(self._job, state=JobState.UNKNOWN)
        is_live = self._job.state.is_live
        self._ranks = ranks_of(self._job, with_gpus=self._asks_gpus) if is_live else ()
        self._doing = doing_now(self._job.folder).text if is_live and self._figures.last is None else ""
        if self._asks_gpus:
            self._gpus = gpus_now() if is_live else ()
            # A machine without GPUs does not get any.
            self._asks_gpus = bool(self._gpus) or not is_live
        if not self._memory_total:
            self._memory_total = read_memory_total(self._job.folder)


def read_memory_total(folder: Path) -> Mapping[str, int]:
    """Returns the bytes that a GPU and the front end's host have by tier, as the job wrote them down; empty before.

    Args:
        folder: folder of the job.
    """
    try:
        return memory_sizes(json.loads(JobPaths(folder).machine.read_bytes())["probe"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
