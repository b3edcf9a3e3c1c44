"""Which rank is slower than the others: the rule, and who steadily is, from what ranks report. Pure.

In a synchronous job all ranks take the same time a step; the slow one is the one that waits least for the others. So
each rank's own time a step is what remains of it without the waiting, and is compared with the median of the others'.
A rank that waits nowhere that it can be seen (a script without dsrun's engine) has the whole step as its own, as all
others have: nobody is named there. Records of waits are judged by the same rule (`records/waits.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.units import format_duration

from ..protocol import RankStatus
from .coordinates import named_rank

#: A rank whose own time is this many times the median of the others is slow, if that costs this share of a step. A
#: rank that computes a fifth longer than others comes to less than 1.2, as moving data takes all ranks equally long.
SLOW_RATIO, LOST_SHARE = 1.15, 0.05
#: Windows in a row in which it must be slow, and what a window must span on every rank.
_WINDOWS, _WINDOW_STEPS, _WINDOW_S = 3, 20, 10.0


def is_slow(own_s: float, *, others_s: float, step_s: float) -> bool:
    """Returns whether a rank is slow.

    Args:
        own_s: its own time a step.
        others_s: median own time a step of the others.
        step_s: time of a step.
    """
    return own_s >= SLOW_RATIO * others_s > 0 and own_s - others_s >= LOST_SHARE * step_s


def medians_of_others(own_s: Mapping[int, float]) -> dict[int, float]:
    """Returns for each of two ranks or more the median own time of the others."""
    ordered = sorted((seconds, rank) for rank, seconds in own_s.items())
    return {rank: _median_without(ordered, place) for place, (_, rank) in enumerate(ordered)}


@dataclass(frozen=True, slots=True)
class Wait:
    """What ranks wait in.

    Attributes:
        collective: name of the collective; empty where none is known.
        seconds: seconds a step.
    """

    collective: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is steadily slow.

    Attributes:
        rank: number of the rank.
        own_s: its own time a step, in the last window.
        others_s: median own time a step of the others.
        others_wait: longest wait of the others, median of those that wait longest there.
        waits: longest wait of the rank itself.
    """

    rank: int
    own_s: float
    others_s: float
    others_wait: Wait = Wait()
    waits: Wait = Wait()

    @property
    def ratio(self) -> float:
        """Its own time over the median of the others'."""
        return self.own_s / self.others_s

    def text(self, host: str, *, coordinate: str = "") -> str:
        """Returns what people are told.

        Args:
            host: name of the host that the rank runs on.
            coordinate: place of the rank on the axes of the job; empty where its number says it.
        """
        parts = [
            f"{named_rank(self.rank, coordinate)} on {host} is steadily slower than the others: "
            f"{format_duration(self.own_s)} of its own a step, {self.ratio:.2f} x their median of "
            f"{format_duration(self.others_s)}"
        ]
        if self.others_wait.collective:
            waited = format_duration(self.others_wait.seconds)
            parts.append(f"they wait longest in {self.others_wait.collective}, {waited} a step")
        if self.waits.collective:
            waited = format_duration(self.waits.seconds)
            parts.append(f"it waits longest in {self.waits.collective}, {waited} a step")
        return "; ".join(parts)


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
        self._longest: dict[int, Wait] = {}
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
            self._longest[rank.rank] = Wait(rank.longest_wait, rank.longest_wait_s)
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
        step_s = {rank: _step_time_s(self._begin[rank], mark) for rank, mark in self._latest.items()}
        self._begin = dict(self._latest)
        self._full.clear()
        news: list[Straggler] = []
        for rank, others_s in medians_of_others(own_s).items():
            slow = is_slow(own_s[rank], others_s=others_s, step_s=step_s[rank])
            self._slow_windows[rank] = self._slow_windows.get(rank, 0) + 1 if slow else 0
            if self._slow_windows[rank] == _WINDOWS and rank not in self._named:
                self._named.add(rank)
                news.append(
                    Straggler(
                        rank, own_s[rank], others_s, self._longest_of_others(rank), self._longest.get(rank, Wait())
                    )
                )
        return news

    def _longest_of_others(self, rank: int) -> Wait:
        by_collective: dict[str, list[float]] = {}
        for other, wait in self._longest.items():
            if other != rank and wait.collective:
                by_collective.setdefault(wait.collective, []).append(wait.seconds)
        if not by_collective:
            return Wait()
        collective = max(by_collective, key=lambda each: sum(by_collective[each]))
        return Wait(collective, statistics.median(by_collective[collective]))


def _median_without(ordered: Sequence[tuple[float, int]], place: int) -> float:
    """Returns the median of the first numbers of all pairs but one, which are in order."""
    left = len(ordered) - 1
    lower, upper = (each + (each >= place) for each in ((left - 1) // 2, left // 2))
    return (ordered[lower][0] + ordered[upper][0]) / 2


def _step_time_s(begin: _Mark, end: _Mark) -> float:
    return (end.time_s - begin.time_s) / (end.step - begin.step)


def _own_time_s(begin: _Mark, end: _Mark) -> float:
    waited_s = (end.waited_s - begin.waited_s) / (end.step - begin.step)
    return max(0.0, _step_time_s(begin, end) - waited_s)
