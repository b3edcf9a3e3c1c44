"""How well two orders agree. Knows nothing of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pairs of things by how two figures order them.

    Attributes:
        alike: number of pairs in the same order by both figures.
        reversed: number of pairs in opposite orders.
        tied: number of pairs that are equal by a figure.
    """

    alike: int
    reversed: int
    tied: int

    @property
    def tau(self) -> float:
        """Kendall's tau a: a pair that is tied counts as a pair, and for neither side.

        Source: Kendall, A new measure of rank correlation, 1938.
        """
        return (self.alike - self.reversed) / (self.alike + self.reversed + self.tied)


def agreement(first: Sequence[float], second: Sequence[float]) -> Agreement:
    """Returns how the pairs of two things or more are ordered.

    Args:
        first: a figure of each thing.
        second: another figure of each, in the same order.
    """
    signs = [
        _sign(one - other) * _sign(mine - theirs)
        for (one, mine), (other, theirs) in combinations(zip(first, second, strict=True), 2)
    ]
    return Agreement(alike=signs.count(1), reversed=signs.count(-1), tied=signs.count(0))


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
