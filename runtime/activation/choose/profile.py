"""What recomputed calls kept, dropped and took: gathered by name, and shown as a table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from dsrun.units import format_bytes

_HEADS = ("block", "kept", "dropped", "forward", "again")


@dataclass(slots=True)
class CallFigures:
    """Of all calls of one name.

    Attributes:
        kept_bytes: inputs kept by the last call.
        dropped_bytes: bytes of the tensors that the last call dropped and did not save for backward, without
            parameters.
        seconds: seconds of the first runs.
        again_s: seconds of the later runs, which recompute.
    """

    kept_bytes: int = 0
    dropped_bytes: int = 0
    seconds: list[float] = field(default_factory=list[float])
    again_s: list[float] = field(default_factory=list[float])


class Profile:
    """An observer of recomputed calls, see options.Observer."""

    def __init__(self) -> None:
        self.figures: dict[str, CallFigures] = {}

    def ran(self, name: str, *, seconds: float, kept_bytes: int, dropped_bytes: int) -> None:
        """See `Observer`."""
        figures = self.figures.setdefault(name, CallFigures())
        figures.kept_bytes, figures.dropped_bytes = kept_bytes, dropped_bytes
        figures.seconds.append(seconds)

    def ran_again(self, name: str, *, seconds: float) -> None:
        """See `Observer`."""
        self.figures.setdefault(name, CallFigures()).again_s.append(seconds)

    def __str__(self) -> str:
        """Returns a table of the last bytes and the median seconds, one line a name."""
        rows = [_HEADS, *(_row(name, figures) for name, figures in self.figures.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


def _row(name: str, figures: CallFigures) -> tuple[str, ...]:
    return (
        name,
        format_bytes(figures.kept_bytes),
        format_bytes(figures.dropped_bytes),
        _milliseconds(figures.seconds),
        _milliseconds(figures.again_s),
    )


def _milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms" if seconds else "-"
