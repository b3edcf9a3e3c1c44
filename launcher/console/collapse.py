"""Lines that several ranks print at almost the same time become one. Pure: the time is an argument.

[Note: collapsing] A line is held for a short window; the same text on the same stream from another rank joins it. A
rank joins only lines behind its own last one, so its lines keep their order. A line that all ranks have printed
leaves at once, when none before it waits. Nobody reads hundreds of lines in a window: above that nothing is held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol import StreamName

#: How long a line waits for its like from other ranks.
WINDOW_S = 0.1
#: Lines within a window above which they pass.
_MOST_LINES = 500


@dataclass(slots=True)
class HeldLine:
    """A line, by whom it was printed so far, and when it leaves."""

    ranks: list[int]
    stream: StreamName
    text: str
    due_s: float


class LineCollapser:
    """See [Note: collapsing].

    Args:
        rank_count: ranks whose lines are given.
        window_s: seconds that a line waits for the same line of other ranks; see `WINDOW_S`.
        most_lines: lines within a window above which nothing is held.
    """

    def __init__(self, rank_count: int, *, window_s: float = WINDOW_S, most_lines: int = _MOST_LINES) -> None:
        self._rank_count = rank_count
        self._window_s = window_s
        self._most_lines = most_lines
        self._held: list[HeldLine] = []
        # Lines are numbered from the beginning; the first held one has this number.
        self._first = 0
        self._numbers_of: dict[tuple[StreamName, str], list[int]] = {}
        self._last_of: dict[int, int] = {}
        self._counted = 0
        self._count_until_s = float("-inf")

    @property
    def due_s(self) -> float | None:
        """When the next line leaves; None if none is held."""
        return self._held[0].due_s if self._held else None

    def passes(self, lines: int, *, now_s: float) -> bool:
        """Whether so many lines are too many to be held; if so, `take` what is held and print them after it."""
        if now_s >= self._count_until_s:
            self._counted, self._count_until_s = 0, now_s + self._window_s
        self._counted += lines
        return self._counted > self._most_lines

    def add(self, rank: int, stream: StreamName, texts: Sequence[str], *, now_s: float) -> None:
        """Takes lines of a rank."""
        last = self._last_of.get(rank, -1)
        for text in texts:
            numbers = self._numbers_of.setdefault((stream, text), [])
            position = bisect_right(numbers, last)
            if position < len(numbers):
                last = numbers[position]
                self._held[last - self._first].ranks.append(rank)
            else:
                last = self._first + len(self._held)
                numbers.append(last)
                self._held.append(HeldLine([rank], stream, text, now_s + self._window_s))
        self._last_of[rank] = last

    def take_due(self, now_s: float) -> list[HeldLine]:
        """Returns the lines that leave now, in order."""
        count = 0
        for line in self._held:
            if now_s < line.due_s and len(line.ranks) < self._rank_count:
                break
            count += 1
        return self._take(count)

    def take(self) -> list[HeldLine]:
        """Returns all that is held, in order."""
        return self._take(len(self._held))

    def _take(self, count: int) -> list[HeldLine]:
        if not count:
            return []
        taken, self._held = self._held[:count], self._held[count:]
        self._first += count
        for line in taken:
            numbers = self._numbers_of[line.stream, line.text]
            # In order of numbers, and lines leave in that order.
            del numbers[0]
            if not numbers:
                del self._numbers_of[line.stream, line.text]
        return taken
