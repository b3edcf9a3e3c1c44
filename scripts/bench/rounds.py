"""Figures that are taken round by round, and the table of them with what the project demands. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """What the project demands.

    Attributes:
        limit: upper limit of the median, or of the ratio to `relative_to` in the same round.
        relative_to: another row; None for the median itself.
    """

    limit: float
    relative_to: str | None = None

    def __str__(self) -> str:
        return f"<= {self.limit:g}" + (f" x {self.relative_to}" if self.relative_to else "")


class Rows:
    """Figures by name, a value each round.

    Args:
        rounds: number of rounds that count; one round before them does not.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._values: dict[str, list[float]] = {}

    def rounds(self) -> Iterator[int]:
        """Yields the number of each round; 0 is not counted."""
        yield from range(self._rounds + 1)

    def add(self, name: str, value: float, round_: int) -> None:
        """Notes a figure of this round."""
        values = self._values.setdefault(name, [])
        if round_:
            values.append(value)

    def table(self, unit: str, bars: Mapping[str, Sequence[Bar]], *, ratio_to: str | None = None) -> str:
        """Returns a Markdown table.

        Args:
            unit: unit of the figures.
            bars: demands on each row, by the name of the row.
            ratio_to: the row that a column of ratios refers to.
        """
        head = ["what", f"median {unit}", "least to most", *([f"x {ratio_to}"] if ratio_to else []), "bar"]
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        for name, values in self._values.items():
            cells = [name, f"{statistics.median(values):.3g}", f"{min(values):.3g} to {max(values):.3g}"]
            if ratio_to:
                cells.append(f"{self._ratio(name, ratio_to):.2f}")
            cells.append("; ".join(self._judged(name, bar) for bar in bars.get(name, ())))
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _ratio(self, name: str, other: str) -> float:
        pairs = zip(self._values[name], self._values[other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def _judged(self, name: str, bar: Bar) -> str:
        if bar.relative_to is not None and bar.relative_to not in self._values:
            return f"{bar}: not measured"
        found = statistics.median(self._values[name]) if bar.relative_to is None else self._ratio(name, bar.relative_to)
        return f"{bar}: {found:.3g}, {'met' if found <= bar.limit else '**not met**'}"
