"""How the ranks of a host fare, looked at once a second: heartbeat, processor time, memory. Judges nothing.

Costs a tenth of a millisecond a rank, so that the agent of a big host stays out of the way of its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from dsrun.contract.heartbeats import Beat, HeartbeatTable, StartState

from ...protocol import Pulse, RankStatus, Starting
from ..start.worker import RankProcess

#: Between two pulses.
PULSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Usage:
    cpu_s: float
    time_s: float


class StatusTaking:
    """Looks at ranks; remembers their processor time from one look to the next.

    Args:
        table: heartbeat table, in which the ranks themselves say how they fare.
        are_python: the ranks tell when their program begins.
    """

    def __init__(self, table: HeartbeatTable, *, are_python: bool = False) -> None:
        self._table = table
        self._are_python = are_python
        self._usage: dict[int, _Usage] = {}

    def take(self, ranks: Iterable[RankProcess], now_s: float, *, importing: Sequence[int] = ()) -> Pulse:
        """Returns how ranks fare now.

        Args:
            ranks: those that run; one that has ended unseen is left out.
            now_s: monotonic seconds.
            importing: ranks that exist only once the host's spawner has imported torch for them; see `Pulse`.
        """
        pulses = [pulse for rank in ranks if (pulse := self._look_at(rank, now_s)) is not None]
        return Pulse(ranks=pulses, time_s=time.time(), importing=list(importing))

    def _look_at(self, rank: RankProcess, now_s: float) -> RankStatus | None:
        try:
            times = rank.process.cpu_times()
            rss_bytes = rank.process.memory_info().rss
        except psutil.NoSuchProcess:
            return None
        usage = _Usage(times.user + times.system, now_s)
        before = self._usage.get(rank.rank)
        self._usage[rank.rank] = usage
        passed_s = 0.0 if before is None else usage.time_s - before.time_s
        cpu_percent = 0.0 if before is None or passed_s <= 0 else 100 * (usage.cpu_s - before.cpu_s) / passed_s
        beat = self._table.read(rank.local_rank)
        return RankStatus(
            rank=rank.rank,
            beats=0 if beat is None else beat.beats,
            step=None if beat is None else beat.step,
            idle_s=idle_s(beat, now_s),
            waited_s=0.0 if beat is None else round(beat.waited_s, 3),
            phase="" if beat is None else beat.phase,
            collective="" if beat is None else beat.collective,
            cpu_percent=round(cpu_percent, 1),
            rss_bytes=rss_bytes,
            starting=self._starting(rank.local_rank),
            longest_wait="" if beat is None else beat.longest_wait,
            longest_wait_s=0.0 if beat is None else round(beat.longest_wait_s, 6),
            step_s=0.0 if beat is None else round(beat.step_s, 6),
            stage=0 if beat is None else beat.stage,
            stages=0 if beat is None else beat.stages,
            schedule_wait=0.0 if beat is None else round(beat.schedule_wait, 4),
            stage_wait_s=0.0 if beat is None else round(beat.stage_wait_s, 6),
            coordinate="" if beat is None else beat.coordinate,
        )

    def _starting(self, local_rank: int) -> Starting:
        match self._table.read_start(local_rank):
            case StartState.IMPORTS_TORCH:
                return "torch"
            case StartState.NOT_BEGUN if self._are_python:
                return "interpreter"
            case _:
                return ""


def idle_s(beat: Beat | None, now_s: float) -> float | None:
    """Seconds since a rank's last beat, by the host's monotonic clock; None if it never has."""
    return None if beat is None else round(max(0.0, now_s - beat.time_s), 3)
