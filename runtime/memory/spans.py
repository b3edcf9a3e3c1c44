"""Which part of a block of memory is taken: first fit, neighbours joined. Pure arithmetic: no memory here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """A span that has a new place, `target` below `source`; `numel` elements, which may overlap."""

    source: int
    target: int
    numel: int


class Spans:
    """The spans of [0, size) that are taken, and the free ones between them.

    Args:
        size: elements of the block.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, int] = {}  # start: numel
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, numel), in order, none adjacent

    @property
    def holes(self) -> int:
        """Free elements below the last taken one: what lifetimes have left."""
        return sum(numel for start, numel in self._free if start + numel < self.size)

    def take(self, numel: int) -> int | None:
        """Takes the first free span that is large enough; returns its start, or None where there is none.

        Args:
            numel: elements, above 0.
        """
        for place, (start, free) in enumerate(self._free):
            if free >= numel:
                self._taken[start] = numel
                self._free[place : place + 1] = [(start + numel, free - numel)] if free > numel else []
                return start
        return None

    def give_back(self, start: int) -> None:
        """Frees the span that was taken at `start`."""
        numel = self._taken.pop(start)
        place = bisect_left(self._free, (start, 0))
        stop = start + numel
        after = place
        if place and sum(self._free[place - 1]) == start:
            place -= 1
            start = self._free[place][0]
        if after < len(self._free) and self._free[after][0] == stop:
            stop = sum(self._free[after])
            after += 1
        self._free[place:after] = [(start, stop - start)]

    def compact(self, may_move: Callable[[int], bool]) -> list[Move]:
        """Moves spans down over the holes below them; returns the moves, to be made in this order.

        Args:
            may_move: function that says for the start of each taken span whether the span may move.
        """
        moves: list[Move] = []
        taken: dict[int, int] = {}
        free: list[tuple[int, int]] = []
        end = 0
        for start, numel in sorted(self._taken.items()):
            target = end if may_move(start) else start
            if target > end:
                free.append((end, target - end))
            if target < start:
                moves.append(Move(start, target, numel))
            taken[target] = numel
            end = target + numel
        if end < self.size:
            free.append((end, self.size - end))
        self._taken, self._free = taken, free
        return moves
