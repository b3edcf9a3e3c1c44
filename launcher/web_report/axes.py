"""Axes of plots: from which value to which, where ticks stand, and how values are written. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from dsrun.units import format_bytes, format_count, format_duration

_STEPS = (1, 2, 5, 10)
_SECOND_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_TICKS = 6
#: Values that differ by more are drawn on a logarithmic axis, or the small ones would all lie on the bottom.
_LOG_RATIO = 50.0
#: Ends of what an axis shows: from one to the other must be a number too. Values beyond lie on the edge.
_MOST = 1e300
#: Share of a value by which sums of the same numbers may differ.
_NOISE = 1e-12
#: An axis begins at 0 where that costs no more of its height.
_TO_ZERO = 0.5


class Unit(enum.Enum):
    """How values are written; the script of the page writes them alike."""

    NUMBER = "number"
    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"

    def text(self, value: float) -> str:
        """Returns a value as it is read."""
        match self:
            case Unit.COUNT:
                return format_count(value)
            case Unit.BYTES:
                return format_bytes(value)
            case Unit.SECONDS:
                return "0" if value == 0 else format_duration(value).removesuffix(" 0s").removesuffix(" 0m")
            case Unit.SHARE:
                return f"{100 * value:.3g}%"
            case Unit.NUMBER:
                return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        low: Value at its beginning.
        high: Value at its end, above `low`.
        unit: Form in which its values are written.
        is_log: Whether equal ratios are equal lengths.
    """

    low: float
    high: float
    unit: Unit = Unit.NUMBER
    is_log: bool = False

    def place(self, value: float) -> float:
        """Returns where a value lies, from 0 at the beginning to 1 at the end."""
        if self.is_log:
            value = min(max(value, self.low), self.high)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns the ticks, each a place from 0 to 1 and its text; two of the same text are one."""
        values = self._log_values() if self.is_log else self._linear_values()
        by_text: dict[str, float] = {}
        for value in values:
            by_text.setdefault(self.unit.text(value), self.place(value))
        return [(place, text) for text, place in by_text.items()]

    def _linear_values(self) -> list[float]:
        step = self._step((self.high - self.low) / _TICKS)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _step(self, wanted: float) -> float:
        if self.unit is Unit.SECONDS and wanted >= 1:
            return next((step for step in _SECOND_STEPS if step >= wanted), 86400 * math.ceil(wanted / 86400))
        base = 1.0
        if self.unit is Unit.BYTES:
            base = 1024.0 ** max(0, math.floor(math.log(max(self.high, 1), 1024)))
        scale = 10.0 ** math.floor(math.log10(wanted / base))
        return base * scale * next(each for each in _STEPS if each * scale * base >= wanted * (1 - 1e-9))

    def _log_values(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = last - first
        parts = (1, 2, 5) if decades <= 3 else (1,)
        every = max(1, math.ceil(decades / 6))
        values = [part * 10.0**power for power in range(first, last + 1, every) for part in parts]
        return [value for value in values if self.low <= value <= self.high]


def value_axis(values: Iterable[float], unit: Unit, *, may_be_log: bool = False, from_zero: bool = False) -> Axis:
    """Returns an axis on which all values lie.

    Args:
        values: Finite values, one at least.
        unit: Form in which they are written.
        may_be_log: Whether the axis may be logarithmic.
        from_zero: Whether the axis begins at 0 in any case.
    """
    known = list(values)
    low, high = (min(max(value, -_MOST), _MOST) for value in (min(known), max(known)))
    if may_be_log and low > 1 / _MOST and high / _LOG_RATIO > low:
        return Axis(low / 1.1, high * 1.1, unit, is_log=True)
    if from_zero or 0 <= low <= _TO_ZERO * high:
        low = min(low, 0.0)
    if high - low <= _NOISE * max(abs(low), abs(high)):
        pad = abs(high) / 10 or 1.0
        low, high = (low, high + pad) if low == 0 else (low - pad, high + pad)
    room = (high - low) / 20
    return Axis(low if low == 0 else low - room, high + room, unit)
