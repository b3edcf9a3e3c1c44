"""Lines over numbers of ranks as SVG. It can be read without colour: lines differ in dashes, points in shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 60, 60
_INK, _GRID = "#10263d", "#d5dde5"
#: Colour and dashes of each line.
_LOOKS = (("#1f4e79", ""), ("#c05a00", "7 4"))


@dataclass(frozen=True, slots=True)
class Line:
    """A line with published points.

    Attributes:
        label: words beside its end.
        values: numbers of ranks and values of the line.
        published: numbers of ranks and values of points beside it.
    """

    label: str
    values: Sequence[tuple[int, float]]
    published: Sequence[tuple[int, float]]


def svg_of(lines: Sequence[Line], *, title: str, unit: str) -> str:
    """Returns the picture; ranks double from tick to tick.

    Args:
        lines: at most two lines.
        title: words above it.
        unit: unit of the values.
    """
    ranks = sorted({rank for line in lines for rank, _ in line.values})
    values = [value for line in lines for _, value in (*line.values, *line.published)]
    low, high = 20 * int(min(values) // 20 - 1), 20 * int(max(values) // 20 + 1)

    def x(rank: int) -> float:
        span = log2(ranks[-1]) - log2(ranks[0])
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (log2(rank) - log2(ranks[0])) / span

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="sans-serif" font-size="13" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="12" y="44" fill="#4a5b6c">{escape(unit)}; points are published</text>',
    ]
    for value in range(low, high + 1, 20):
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for rank in ranks:
        anchor = "end" if rank == ranks[-1] else "middle"
        parts.append(f'<text x="{x(rank):.1f}" y="{_HEIGHT - _BOTTOM + 22}" text-anchor="{anchor}">{rank:,}</text>')
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 14}" text-anchor="middle">GPUs</text>')
    for number, line in enumerate(lines):
        colour, dashes = _LOOKS[number]
        path = "L".join(f"{x(rank):.1f} {y(value):.1f}" for rank, value in line.values)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dashed}/>')
        rank, value = line.values[0]
        words = escape(line.label)
        parts.append(f'<text x="{x(rank) + 8:.1f}" y="{y(value) - 10:.1f}" fill="{colour}">{words}</text>')
        parts += _points([(x(rank), y(value), value) for rank, value in line.published], colour, number)
    return "\n".join((*parts, "</svg>", ""))


def _points(places: Sequence[tuple[float, float, float]], colour: str, number: int) -> Iterator[str]:
    for left, top, value in places:
        shape = (
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="6"'
            if number == 0
            else f'<rect x="{left - 6:.1f}" y="{top - 6:.1f}" width="12" height="12"'
        )
        yield f'{shape} fill="#ffffff" stroke="{colour}" stroke-width="2.5"/>'
        yield f'<text x="{left - 11:.1f}" y="{top + 18:.1f}" text-anchor="end" fill="{colour}">{value:g}</text>'
