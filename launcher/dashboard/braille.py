"""A curve as rows of braille characters, each of which is two dots wide and four dots high. Knows no run.

A module of its own, for libraries that plot on terminals return whole figures with axes and escape codes, and a page of
24 lines has room for neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_FIRST = 0x2800
#: Bit of a dot, by its row and its column in a character (Unicode, Braille Patterns).
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_WIDE, _HIGH = 2, 4
#: Below so many points none is taken for an outlier.
_FEW = 50
#: Share of the points at either end that may lie outside of what is drawn.
_OUTSIDE = 0.01


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the least and the greatest value that a curve shows; of many, a hundredth at either end may be outside.

    One spike would otherwise leave a flat line of all the rest.
    """
    ordered = sorted(values)
    outside = int(len(ordered) * _OUTSIDE) if len(ordered) >= _FEW else 0
    return ordered[outside], ordered[-1 - outside]


def curve_rows(
    points: Sequence[tuple[float, float]], *, columns: int, rows: int, low: float | None = None
) -> list[str]:
    """Draws a curve; values outside of `value_range` lie on the edge.

    Args:
        points: place and value of each point, in order of their places.
        columns: number of characters of a row.
        rows: number of rows.
        low: value of the lowest dot; None for the least value.

    Returns:
        the rows, the highest values first; blank ones where there is no point.
    """
    cells = [[0] * columns for _ in range(rows)]
    if points:
        for x, y in _joined(_dots(points, columns * _WIDE, rows * _HIGH, low=low)):
            cells[y // _HIGH][x // _WIDE] |= _BITS[y % _HIGH][x % _WIDE]
    return ["".join(chr(_FIRST + bits) if bits else " " for bits in line) for line in cells]


def _dots(
    points: Sequence[tuple[float, float]], columns: int, rows: int, *, low: float | None
) -> list[tuple[int, int]]:
    """Returns column and row of the dot of each point, from the upper left corner on."""
    first, last = points[0][0], points[-1][0]
    least, high = value_range([value for _, value in points])
    low = least if low is None else low
    wide, tall = last - first, high - low
    return [
        (
            round((place - first) / wide * (columns - 1)) if wide else 0,
            round((high - min(max(value, low), high)) / tall * (rows - 1)) if tall else rows // 2,
        )
        for place, value in points
    ]


def _joined(dots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Returns the dots with those between them; some may come twice."""
    before_x, before_y = dots[0]
    yield before_x, before_y
    for x, y in dots[1:]:
        if (x, y) == (before_x, before_y):
            continue
        steps = max(abs(x - before_x), abs(y - before_y))
        for at in range(1, steps + 1):
            yield before_x + round((x - before_x) * at / steps), before_y + round((y - before_y) * at / steps)
        before_x, before_y = x, y
