"""Figures by round, what is demanded of them, and both as Markdown and as JSON. Measures nothing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the project demands, in words, and what was found; None: it was not measured."""

    demand: str
    found: float | None
    met: bool | None

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.demand}: not measured"
        return f"{self.demand}: {self.found:.3g}, {'met' if self.met else '**not met**'}"


@dataclass(slots=True)
class Figures:
    """One table.

    Attributes:
        title: its heading.
        unit: unit of all figures in the table.
        values: figures of each row by its name, one for each round.
        notes: notes by the name of the row, shown in a column of their own.
        verdicts: verdicts on the figures of the table.
    """

    title: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    notes: dict[str, str] = field(default_factory=dict[str, str])
    verdicts: list[Verdict] = field(default_factory=list[Verdict])

    def add(self, row: str, value: float, note: str = "") -> None:
        """Notes a figure of this round."""
        self.values.setdefault(row, []).append(value)
        if note:
            self.notes[row] = note

    def median(self, row: str) -> float:
        """Returns a row's median."""
        return statistics.median(self.values[row])

    def demand(self, words: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        """Judges a figure, and says so in `words`."""
        met = (least is None or value >= least) and (most is None or value <= most)
        self.verdicts.append(Verdict(words, value, met))

    def demand_ratio(self, row: str, other: str, *, least: float | None = None, most: float | None = None) -> None:
        """Judges one row's figure by another's of the same round; rows that were not measured are said so."""
        bounds = [f">= {least:g}" if least is not None else "", f"<= {most:g}" if most is not None else ""]
        words = f"{row} by {other} {' and '.join(bound for bound in bounds if bound)}"
        if row in self.values and other in self.values:
            self.demand(words, self.ratio(row, other), least=least, most=most)
        else:
            self.verdicts.append(Verdict(words, None, None))

    def ratio(self, row: str, other: str) -> float:
        """Returns the median over the rounds of one row's figure by another's of the same round."""
        pairs = zip(self.values[row], self.values[other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def markdown(self) -> str:
        """Returns a heading, a table, and a line a verdict."""
        noted = bool(self.notes)
        head = ["what", f"median {self.unit}", "least to most", *([" "] if noted else [])]
        lines = [f"### {self.title}", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        for row, values in self.values.items():
            spread = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else "one run"
            cells = [row, f"{self.median(row):.4g}", spread, *([self.notes.get(row, "")] if noted else [])]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, "", *(f"- {verdict}" for verdict in self.verdicts)])

    def as_json(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        return {
            "title": self.title,
            "unit": self.unit,
            "rows": [
                {"name": row, "median": self.median(row), "values": values, "note": self.notes.get(row, "")}
                for row, values in self.values.items()
            ],
            "verdicts": [{"demand": v.demand, "found": v.found, "met": v.met} for v in self.verdicts],
        }
