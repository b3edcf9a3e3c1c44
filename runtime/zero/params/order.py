"""In which order units are needed: recorded while they are, and asked what comes next. Nothing is gathered here."""

from __future__ import annotations

from ..units.unit import ParamUnit


class RecordedOrder:
    """The sequence of acquired units of one step, and where in it we are."""

    def __init__(self) -> None:
        self._recorded: list[ParamUnit] = []
        self._seen: list[ParamUnit] = []
        self._position = 0

    def after(self, unit: ParamUnit, count: int) -> list[ParamUnit]:
        """Notes that `unit` was acquired; returns what the recorded step acquired after it, at most `count` units.

        A unit that the recorded step did not acquire from here on is followed by nothing anybody knows.
        """
        self._seen.append(unit)
        try:
            self._position = self._recorded.index(unit, self._position) + 1
        except ValueError:
            return []
        return self._recorded[self._position : self._position + count]

    def restart(self) -> None:
        """A step has ended: what it did is what the next one is expected to do."""
        self._recorded, self._seen, self._position = self._seen, [], 0


class EvaluatedOrder:
    """What follows each unit in forwards without a backward.

    In such forwards, unlike in a training step, a unit is followed by the same one every time, also where a text is
    generated and nobody knows how many forwards there will be.
    """

    def __init__(self) -> None:
        self._last: ParamUnit | None = None
        self._following: dict[int, ParamUnit] = {}

    def after(self, unit: ParamUnit, count: int) -> list[ParamUnit]:
        """Notes that `unit` was acquired; returns what came after it the last time, at most `count` units."""
        if self._last is not None and self._last is not unit:
            self._following[self._last.index] = unit
        self._last = unit
        found: list[ParamUnit] = []
        following = self._following.get(unit.index)
        while following is not None and len(found) < count:
            found.append(following)
            following = self._following.get(following.index)
        return found
