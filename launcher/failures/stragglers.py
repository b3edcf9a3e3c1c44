"""Which rank is steadily slower than the others: from steps and waiting time that ranks report. Pure.

In a synchronous job all ranks take the same time a step; the slow one is the one that waits least for the others. So
each rank's own time a step is what remains of it without the waiting, and is compared with the median of all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol import RankStatus

#: A rank whose own time is this many times the median is slow.
SLOW_RATIO = 1.2
#: Windows in a row in which it must be slow, and what a window must span on every rank.
_WINDOWS, _WINDOW_STEPS, _WINDOW_S = 3, 20, 10.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is steadily slow.

    Attributes:
        rank: number of the rank.
        ratio: its own time a step over the median of all ranks, in the last window.
    """

    rank: int
    ratio: float


@dataclass(frozen=True, slots=True)
class _Mark:
    time_s: float
    step: int
    waited_s: float


class StragglerTracker:
    """Follows all ranks of one attempt, window by window; names each straggler once.

    Args:
        world_size: ranks of the job; nobody is slow before all of them report steps.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._begin: dict[int, _Mark] = {}
        self._latest: dict[int, _Mark] = {}
        self._full: set[int] = set()
        self._slow_windows: dict[int, int] = {}
        self._named: set[int] = set()

    def pulse(self, ranks: Iterable[RankStatus], time_s: float) -> list[Straggler]:
        """Takes how the ranks of a host fare.

        Args:
            ranks: status of the ranks of one host.
            time_s: time when the ranks were looked at, by that host's clock.

        Returns:
            ranks that are known as stragglers now and were not before.
        """
        for rank in ranks:
            if rank.step is not None:
                self._take(rank.rank, _Mark(time_s, rank.step, rank.waited_s))
        return self._close_window() if 1 < self._world_size == len(self._full) else []

    def _take(self, rank: int, mark: _Mark) -> None:
        begin = self._begin.setdefault(rank, mark)
        if mark.step < begin.step or mark.time_s < begin.time_s:
            # An older checkpoint was loaded, or the host's clock was set: what was measured is void.
            self._begin[rank] = begin = mark
            self._full.discard(rank)
        latest = self._latest.get(rank)
        if latest is None or mark.step != latest.step:
            # Only where a step was seen to end: a window that is cut inside one would count half a step's waiting.
            self._latest[rank] = mark
        if mark.step - begin.step >= _WINDOW_STEPS and mark.time_s - begin.time_s >= _WINDOW_S:
            self._full.add(rank)

    def _close_window(self) -> list[Straggler]:
        own_s = {rank: _own_time_s(self._begin[rank], mark) for rank, mark in self._latest.items()}
        self._begin = dict(self._latest)
        self._full.clear()
        median_s = statistics.median(own_s.values())
        news: list[Straggler] = []
        for rank, seconds in sorted(own_s.items()):
            is_slow = seconds >= SLOW_RATIO * median_s > 0
            self._slow_windows[rank] = self._slow_windows.get(rank, 0) + 1 if is_slow else 0
            if self._slow_windows[rank] == _WINDOWS and rank not in self._named:
                self._named.add(rank)
                news.append(Straggler(rank, seconds / median_s))
        return news


def _own_time_s(begin: _Mark, end: _Mark) -> float:
    wall_s, waited_s = end.time_s - begin.time_s, end.waited_s - begin.waited_s
    return max(0.0, wall_s - waited_s) / (end.step - begin.step)
