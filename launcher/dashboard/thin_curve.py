"""A figure over the steps of a whole run, in memory that does not grow with the run. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass

#: Points that a curve has at most: more than any terminal has dots side by side.
MOST_POINTS = 2048


@dataclass(slots=True)
class _Stretch:
    number: int
    total: float
    count: int


class ThinCurve:
    """Means of a figure over stretches of steps, all equally long; the stretches double when there are too many.

    Args:
        most_points: number of stretches that are kept at most.
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._steps_each = 1
        self._stretches: list[_Stretch] = []

    def add(self, step: int, value: float) -> None:
        """Takes the value of a step; steps come in order."""
        number = step // self._steps_each
        if self._stretches and self._stretches[-1].number == number:
            self._stretches[-1].total += value
            self._stretches[-1].count += 1
            return
        self._stretches.append(_Stretch(number, value, 1))
        if len(self._stretches) > self._most_points:
            self._halve()

    def cut(self, step: int) -> None:
        """Forgets this step and those after it; of a stretch that it lies in, the steps before it too."""
        while self._stretches and (self._stretches[-1].number + 1) * self._steps_each > step:
            self._stretches.pop()

    def points(self) -> list[tuple[float, float]]:
        """Returns step and value of each point; the step is the middle of the stretch."""
        middle = (self._steps_each - 1) / 2
        return [(each.number * self._steps_each + middle, each.total / each.count) for each in self._stretches]

    def _halve(self) -> None:
        self._steps_each *= 2
        kept: list[_Stretch] = []
        for each in self._stretches:
            each.number //= 2
            if kept and kept[-1].number == each.number:
                kept[-1].total += each.total
                kept[-1].count += each.count
            else:
                kept.append(each)
        self._stretches = kept
