"""A measured figure with its spread. Times nothing itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsrun.errors import LaunchError

#: Fewer tell nothing of the spread.
LEAST_REPETITIONS = 3

Unit = Literal["B/s", "1/s", "FLOP/s", "s"]

_PREFIXES = ("", "k", "M", "G", "T", "P")
_SHOWN = {"B/s": "B/s", "FLOP/s": "FLOP/s", "1/s": "/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured, several times.

    Attributes:
        name: name of the measured thing, in words.
        unit: unit of the values.
        median: median over the repetitions.
        low: the smallest.
        high: the largest.
        repetitions: number of repetitions.
    """

    name: str
    unit: Unit
    median: float
    low: float
    high: float
    repetitions: int

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; `source` is where the probe's other values have `reported` or `unknown`."""
        return {**asdict(self), "source": "measured"}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Figure:
        """Reads what `to_json` has made."""
        return Figure(**{name: value[name] for name in Figure.__slots__})


def figure(name: str, unit: Unit, values: Sequence[float]) -> Figure:
    """Puts repetitions together.

    Raises:
        LaunchError: there are fewer than `LEAST_REPETITIONS`.
    """
    if len(values) < LEAST_REPETITIONS:
        raise LaunchError(f"{name}: {len(values)} repetitions are too few to tell the spread")
    return Figure(
        name=name,
        unit=unit,
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        repetitions=len(values),
    )


def figure_text(figure: Figure) -> str:
    """Returns the median and the spread: `12.4 GB/s (11.9 to 12.6)`. Decimal units, as makers give rates."""
    scale, unit = _unit_of(figure)
    low, median, high = (f"{value * scale:.3g}" for value in (figure.low, figure.median, figure.high))
    return f"{median} {unit} ({low} to {high})"


def median_text(figure: Figure) -> str:
    """Returns the median alone: `12.4 GB/s`."""
    scale, unit = _unit_of(figure)
    return f"{figure.median * scale:.3g} {unit}"


def _unit_of(figure: Figure) -> tuple[float, str]:
    if figure.unit == "s":
        return (1e6, "us") if figure.median < 1e-3 else (1e3, "ms")
    power = 0
    while figure.median >= 1000 ** (power + 1) and power < len(_PREFIXES) - 1:
        power += 1
    return 1000.0**-power, _PREFIXES[power] + _SHOWN[figure.unit]
