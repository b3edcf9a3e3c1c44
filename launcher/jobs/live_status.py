"""`live.json`: how the ranks of a running job fare, for whoever looks at the job from outside. Written often, whole.

A reader sees one state or the next, never a half: the file is replaced by a rename. It is not synced, for after a power
cut nobody asks how a dead job fared. Whether the job still runs is not said here; its age says how fresh it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths

from ..protocol import RankStatus

#: Between two states of the file.
WRITE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRank:
    """One rank as its host last saw it.

    Attributes:
        rank: number of the rank.
        host: name of the host that the rank runs on.
        pid: pid of the rank's process on that host; None while it is not known.
        seen_s: time when the rank's last pulse came, seconds since the epoch.
        step: optimizer steps the rank has finished; None where it does not say. This and the fields below are as in
            `RankStatus`.
        phase: phase that the rank says it is in, `forward` or the script's own word.
        collective: the one it waits in.
        idle_s: seconds since its last beat.
        waited_s: seconds it has waited in collectives.
        cpu_percent: CPU use of the rank, in percent of one core.
        rss_bytes: memory it has resident.
        longest_wait: the collective that it has waited in longest in its last steps.
        longest_wait_s: seconds a step that it has waited there.
        step_s: seconds that such a step took.
        stage: number of its pipeline stage.
        stages: number of pipeline stages; 0 where it says nothing of stages.
        schedule_wait: share of a step that the schedule has ranks wait.
        stage_wait_s: seconds a step that it has waited for ranks of other stages.
        coordinate: place on the axes of the job; empty where the rank's number says it.
    """

    rank: int
    host: str
    pid: int | None
    seen_s: float
    step: int | None
    phase: str
    collective: str
    idle_s: float | None
    waited_s: float
    cpu_percent: float
    rss_bytes: int
    longest_wait: str = ""
    longest_wait_s: float = 0.0
    step_s: float = 0.0
    stage: int = 0
    stages: int = 0
    schedule_wait: float = 0.0
    stage_wait_s: float = 0.0
    coordinate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """A running job at one moment.

    Attributes:
        time_s: time when this state was written, seconds since the epoch.
        ranks: those that run, in order.
    """

    time_s: float
    ranks: tuple[LiveRank, ...]


class LiveStatus:
    """Collects pulses and writes them, at most every `WRITE_INTERVAL_S`.

    Args:
        folder: the job's; it must exist.
        hosts: host of each rank, by rank.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: Path, hosts: Sequence[str], *, clock: Callable[[], float]) -> None:
        self._paths = JobPaths(folder)
        self._hosts = hosts
        self._clock = clock
        self._ranks: dict[int, LiveRank] = {}
        self._pids: dict[int, int] = {}
        self._is_stale = False
        self._next_write_s = 0.0

    def started(self, rank: int, pid: int) -> None:
        """Learns a rank's process."""
        self._pids[rank] = pid

    def ended(self, rank: int) -> None:
        """A rank runs no more."""
        self._pids.pop(rank, None)
        self._is_stale |= self._ranks.pop(rank, None) is not None

    def pulse(self, ranks: Sequence[RankStatus]) -> None:
        """Takes how the ranks of one host fare."""
        now_s = self._clock()
        for pulse in ranks:
            self._ranks[pulse.rank] = LiveRank(
                rank=pulse.rank,
                host=self._hosts[pulse.rank],
                pid=self._pids.get(pulse.rank),
                seen_s=round(now_s, 3),
                step=pulse.step,
                phase=pulse.phase,
                collective=pulse.collective,
                idle_s=pulse.idle_s,
                waited_s=pulse.waited_s,
                cpu_percent=pulse.cpu_percent,
                rss_bytes=pulse.rss_bytes,
                longest_wait=pulse.longest_wait,
                longest_wait_s=pulse.longest_wait_s,
                step_s=pulse.step_s,
                stage=pulse.stage,
                stages=pulse.stages,
                schedule_wait=pulse.schedule_wait,
                stage_wait_s=pulse.stage_wait_s,
                coordinate=pulse.coordinate,
            )
        self._is_stale = True

    def tick(self, now_s: float) -> float | None:
        """Writes what is new, if it is time.

        Args:
            now_s: present time in seconds, by a clock that does not go back.

        Returns:
            when it will be time for what is new since; None if nothing is.
        """
        if self._is_stale and now_s >= self._next_write_s:
            self._next_write_s = now_s + WRITE_INTERVAL_S
            self.write()
        return self._next_write_s if self._is_stale else None

    def write(self) -> None:
        """Writes the present state now; a folder that is full or gone keeps the state before."""
        self._is_stale = False
        ranks = [asdict(self._ranks[rank]) for rank in sorted(self._ranks)]
        body = json.dumps({"schema_version": 1, "time": round(self._clock(), 3), "ranks": ranks})
        temporary = self._paths.live_draft
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(body.encode())
            os.replace(temporary, self._paths.live)
        except OSError:
            # Its age tells every reader; the job's own files report the disk, once.
            return


_FIELDS = frozenset(field.name for field in fields(LiveRank))


def read_live(folder: Path) -> LiveJob | None:
    """Reads how a job's ranks fare.

    Args:
        folder: the job's.

    Returns:
        the newest state; None where none was written, or it is of a form this version does not know.
    """
    try:
        body: Any = json.loads(JobPaths(folder).live.read_bytes())
        return LiveJob(time_s=float(body["time"]), ranks=tuple(_read_rank(item) for item in body["ranks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_rank(item: Mapping[str, Any]) -> LiveRank:
    # Fields of a later version are left out.
    return LiveRank(**{name: value for name, value in item.items() if name in _FIELDS})
