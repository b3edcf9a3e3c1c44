"""Plots as values: an SVG whose curves fill it at any width, with ticks, legend and words beside it for the page.

[Note: plots of any width] The SVG has 1000 by 1000 units and is stretched to the box that the page gives it; strokes
keep their width (`vector-effect`), and all text stands outside of it as text of the page. So a plot can be read on a
telephone as on a large screen. Elements are made by ElementTree: whatever a name holds, the SVG is well-formed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from ..console.status_area import plain
from .axes import Axis, Unit, value_axis
from .curves import MOST_POINTS, Piece, bucket_bounds, mean, thin

_SIZE = 1000
#: Numbers that Unicode gives to no character, and XML refuses.
_NO_CHARACTERS = {0xFFFE: "\ufffd", 0xFFFF: "\ufffd"}
#: Colours of the page; more series repeat them with another dash.
COLOURS = 8
#: Ranges of a stacked area: its lines are means, and smooth.
_AREA_BUCKETS = 300
#: Marks at the foot of a plot that are drawn, of each kind.
_MOST_MARKS = 300
#: Bars that are drawn on a lane of a timeline: the last ones.
_MOST_BARS = 3000
#: Steps of colour of a heat map.
HEAT_LEVELS = 8


@dataclass(frozen=True, slots=True)
class Tick:
    """Attributes:
    percent: Place from the left, or from the bottom.
    text: Text beside it.
    """

    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class Key:
    """One row of a legend.

    Attributes:
        style: Class of the swatch on the page.
        text: Name of the series.
        series: Name of what a click hides, on the page's elements.
    """

    style: str
    text: str
    series: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot for the page.

    Attributes:
        title: Figure that it shows.
        sentence: Sentence or two about it.
        svg: The drawing, as XML.
        x_ticks: Ticks from left to right.
        y_ticks: Ticks from bottom to top.
        keys: The legend; empty for one series.
        x_name: Name of the horizontal axis.
        x: Horizontal axis, for values under the pointer; None where there are none.
        y: Vertical axis; None likewise.
        height: Height in pixels.
    """

    title: str
    sentence: str
    svg: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    keys: Sequence[Key] = ()
    x_name: str = "step"
    x: Axis | None = None
    y: Axis | None = None
    height: int = 220


@dataclass(frozen=True, slots=True)
class Line:
    """One curve.

    Attributes:
        name: Its name in the legend.
        xs: Places, rising.
        ys: Values, NaN where one is missing.
        colour: Number of its colour; from `COLOURS` on, of colour and dash.
        is_faint: Whether it is drawn behind the others and without a row in the legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Places of one kind on the horizontal axis.

    Attributes:
        name: Name of the kind, for the legend.
        style: Class on the page: `rewound` is a band, others are dots at the foot.
        spans: Beginnings and ends; both alike for a dot.
    """

    name: str
    style: str
    spans: Sequence[tuple[float, float]]


def line_plot(
    title: str,
    sentence: str,
    lines: Sequence[Line],
    *,
    unit: Unit = Unit.NUMBER,
    x_unit: Unit = Unit.COUNT,
    x_name: str = "step",
    marks: Sequence[Mark] = (),
    limits: Sequence[tuple[str, float]] = (),
    may_be_log: bool = False,
    from_zero: bool = False,
    height: int = 220,
) -> Plot | None:
    """Returns curves over one axis; None where none has a value.

    Args:
        title: Figure that the plot shows.
        sentence: Sentence or two about it.
        lines: Curves; those without a value are left out.
        unit: Form in which values are written.
        x_unit: Form in which places are written.
        x_name: Name of the horizontal axis.
        marks: Places that are marked.
        limits: Names and values of straight lines across.
        may_be_log: Whether the vertical axis may be logarithmic.
        from_zero: Whether the vertical axis begins at 0 in any case.
        height: Height in pixels.
    """
    most = MOST_POINTS if len(lines) <= COLOURS else MOST_POINTS // 4
    drawn = [(line, pieces) for line in lines if (pieces := thin(line.xs, line.ys, most=most))]
    if not drawn:
        return None
    values = [value for _, pieces in drawn for piece in pieces for _, value in piece] + [value for _, value in limits]
    # Where a curve ends because nothing is known any more, the plot goes on to the last place.
    x = _place_axis([place for line, _ in drawn for place in (line.xs[0], line.xs[-1])], x_unit)
    y = value_axis(values, unit, may_be_log=may_be_log, from_zero=from_zero)
    svg = _svg(title)
    _draw_grid(svg, x, y)
    keys: list[Key] = []
    for mark in marks:
        if mark.spans and _draw_mark(svg, mark, x):
            keys.append(Key(f"swatch-{mark.style}", mark.name))
    for line, pieces in sorted(drawn, key=lambda each: not each[0].is_faint):
        style = _style(line.colour)
        _draw_pieces(svg, pieces, x, y, style=f"line {style}{' faint' if line.is_faint else ''}", name=line.name)
    for line, _ in drawn:
        if not line.is_faint:
            keys.append(Key(f"swatch {_style(line.colour)}", line.name, series=line.name))
    for name, value in limits:
        _add(svg, "path", d=f"M0 {_down(y, value)}H{_SIZE}", style="limit")
        keys.append(Key("swatch-limit", f"{name}: {unit.text(value)}"))
    shown = keys if len(keys) > 1 else []
    return _plot(title, sentence, svg, x, y, keys=shown, x_name=x_name, height=height)


def area_plot(
    title: str, sentence: str, xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], *, unit: Unit
) -> Plot | None:
    """Returns layers stacked on each other, the first one lowest; None where none has a value.

    Args:
        title: Figure that the plot shows.
        sentence: Sentence or two about it.
        xs: Places, rising.
        layers: Names and values; where one is missing, it counts as 0.
        unit: Form in which values are written.
    """
    bounds = bucket_bounds(len(xs), _AREA_BUCKETS)
    if not bounds or not layers:
        return None
    places = [mean(xs[begin:end]) for begin, end in bounds]
    floor = [0.0] * len(bounds)
    tops: list[list[float]] = []
    for _, values in layers:
        means = [mean(values[begin:end]) for begin, end in bounds]
        floor = [low + (0.0 if math.isnan(each) else each) for low, each in zip(floor, means, strict=True)]
        tops.append(floor)
    if max(floor) <= 0:
        return None
    x, y = _place_axis(places, Unit.COUNT), value_axis(floor, unit, from_zero=True)
    svg = _svg(title)
    _draw_grid(svg, x, y)
    below = [0.0] * len(bounds)
    for number, ((name, _), top) in enumerate(zip(layers, tops, strict=True)):
        there = " ".join(f"{_across(x, at)} {_down(y, value)}" for at, value in zip(places, top, strict=True))
        back = zip(reversed(places), reversed(below), strict=True)
        d = f"M{there} {' '.join(f'{_across(x, at)} {_down(y, value)}' for at, value in back)}Z"
        _add(svg, "path", d=d, style=f"area {_style(number)}", name=name)
        below = top
    keys = [Key(f"swatch filled {_style(number)}", name, series=name) for number, (name, _) in enumerate(layers)]
    return _plot(title, sentence, svg, x, y, keys=list(reversed(keys)))


def heat_plot(
    title: str,
    sentence: str,
    columns: Sequence[float],
    rows: Sequence[tuple[str, Sequence[float]]],
    *,
    unit: Unit,
    x_name: str = "step",
) -> Plot | None:
    """Returns a cell for each row and column, the darker the more; the first row is on top. None without values.

    Args:
        title: Figure that the plot shows.
        sentence: Sentence or two about it.
        columns: Ends of the columns on the horizontal axis, rising.
        rows: Labels of rows, and a value for each column; NaN where there is none.
        unit: Form in which values are written.
        x_name: Name of the horizontal axis.
    """
    known = [value for _, values in rows for value in values if math.isfinite(value)]
    if not known or not columns:
        return None
    most = max(known) or 1.0
    width, height = _SIZE / len(columns), _SIZE / len(rows)
    cells: list[list[str]] = [[] for _ in range(HEAT_LEVELS)]
    for down, (_, values) in enumerate(rows):
        for across, value in enumerate(values):
            if math.isfinite(value):
                level = min(HEAT_LEVELS - 1, int(value / most * HEAT_LEVELS))
                left, right = round(across * width, 1), round((across + 1) * width, 1)
                top, bottom = round(down * height, 1), round((down + 1) * height, 1)
                cells[level].append(f"M{left:g} {top:g}H{right:g}V{bottom:g}H{left:g}Z")
    svg = _svg(title)
    for level, paths in enumerate(cells):
        if paths:
            _add(svg, "path", d="".join(paths), style=f"heat{level}")
    keys = [
        Key(f"swatch filled heat{level}", f"to {unit.text(most * (level + 1) / HEAT_LEVELS)}")
        for level in range(HEAT_LEVELS)
    ]
    every = math.ceil(len(rows) / 32)
    y_ticks = [
        Tick(100 - 100 * (row + 0.5) / len(rows), label) for row, (label, _) in enumerate(rows) if row % every == 0
    ]
    each = math.ceil(len(columns) / 6)
    x_ticks = [Tick(100 * (at + 0.5) / len(columns), f"{columns[at]:.0f}") for at in range(0, len(columns), each)]
    return Plot(
        title,
        sentence,
        ElementTree.tostring(svg, encoding="unicode"),
        x_ticks,
        y_ticks,
        keys,
        x_name,
        height=max(60, min(640, 22 * len(rows))),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a lane of a timeline.

    Attributes:
        begin_s: Seconds from the timeline's beginning.
        end_s: Seconds at its end; the same for a moment.
        style: Class on the page.
        text: Words for the pointer that rests on it.
    """

    begin_s: float
    end_s: float
    style: str
    text: str


def lanes_plot(
    title: str, sentence: str, lanes: Sequence[tuple[str, Sequence[Span]]], *, keys: Sequence[Key]
) -> Plot | None:
    """Returns lanes below each other over one axis of time; None where nothing is on them.

    Args:
        title: Figure that the plot shows.
        sentence: Sentence or two about it.
        lanes: Names, and what is on each.
        keys: The legend.
    """
    lanes = [lane for lane in lanes if lane[1]]
    if not lanes:
        return None
    ends = [span.end_s for _, spans in lanes for span in spans]
    x = Axis(0.0, max(max(ends), 1e-3) * 1.01, Unit.SECONDS)
    svg = _svg(title)
    _draw_grid(svg, x, None)
    height = _SIZE / len(lanes)
    for number, (_, spans) in enumerate(lanes):
        top, bottom = round((number + 0.2) * height), round((number + 0.8) * height)
        moments = [span for span in spans if span.begin_s == span.end_s]
        every = math.ceil(len(moments) / _MOST_MARKS)
        # Of many moments every so many, the last one among them; bars stay whole.
        bars = [span for span in spans if span.begin_s != span.end_s]
        for span in [*bars[-_MOST_BARS:], *moments[::-1][:: max(1, every)]]:
            left, right = _across(x, span.begin_s), _across(x, span.end_s)
            if span.end_s > span.begin_s:
                d, style = f"M{left} {top}H{max(right, round(left + 1.0, 1))}V{bottom}H{left}Z", f"bar {span.style}"
            else:
                d, style = f"M{left} {top}V{bottom}", f"moment {span.style}"
            ElementTree.SubElement(_add(svg, "path", d=d, style=style), "title").text = printable(span.text)
    y_ticks = [Tick(100 - 100 * (at + 0.5) / len(lanes), name) for at, (name, _) in enumerate(lanes)]
    return Plot(
        title,
        sentence,
        ElementTree.tostring(svg, encoding="unicode"),
        _ticks(x),
        y_ticks,
        keys,
        "time since the job was made",
        height=34 * len(lanes),
    )


def printable(text: str) -> str:
    """Returns a text as a page and XML may hold it: no escapes, no control characters, no halves of characters."""
    return "\n".join(map(plain, text.split("\n"))).translate(_NO_CHARACTERS)


def _plot(
    title: str,
    sentence: str,
    svg: ElementTree.Element,
    x: Axis,
    y: Axis,
    *,
    keys: Sequence[Key],
    x_name: str = "step",
    height: int = 220,
) -> Plot:
    text = ElementTree.tostring(svg, encoding="unicode")
    return Plot(title, sentence, text, _ticks(x), _ticks(y), keys, x_name, x, y, height)


def _place_axis(places: Sequence[float], unit: Unit) -> Axis:
    low, high = min(places), max(places)
    return Axis(low, high, unit) if low < high else Axis(low - 0.5, high + 0.5, unit)


def _ticks(axis: Axis) -> list[Tick]:
    return [Tick(round(100 * place, 2), text) for place, text in axis.ticks()]


def _style(number: int) -> str:
    return f"s{number % COLOURS}" + (f" dash{number // COLOURS % 3}" if number >= COLOURS else "")


def _svg(title: str) -> ElementTree.Element:
    return ElementTree.Element(
        "svg",
        {
            "viewBox": f"0 0 {_SIZE} {_SIZE}",
            "preserveAspectRatio": "none",
            "role": "img",
            "aria-label": printable(title),
        },
    )


def _add(svg: ElementTree.Element, tag: str, *, d: str, style: str, name: str = "") -> ElementTree.Element:
    about = {"class": style, "d": d}
    return ElementTree.SubElement(svg, tag, about | ({"data-series": printable(name)} if name else {}))


def _draw_grid(svg: ElementTree.Element, x: Axis, y: Axis | None) -> None:
    lines = [f"M{round(_SIZE * place, 1):g} 0V{_SIZE}" for place, _ in x.ticks()]
    if y is not None:
        lines += [f"M0 {round(_SIZE * (1 - place))}H{_SIZE}" for place, _ in y.ticks()]
    _add(svg, "path", d="".join(lines) or "M0 0", style="grid")


def _draw_pieces(svg: ElementTree.Element, pieces: Sequence[Piece], x: Axis, y: Axis, *, style: str, name: str) -> None:
    # A piece of one point is a line of no length, which a round end makes a dot.
    d = "".join(
        "M" + " ".join(f"{_across(x, at)} {_down(y, value)}" for at, value in piece) + ("h0" if len(piece) == 1 else "")
        for piece in pieces
    )
    _add(svg, "path", d=d, style=style, name=name)


def _draw_mark(svg: ElementTree.Element, mark: Mark, x: Axis) -> bool:
    inside = [(a, b) for a, b in mark.spans if b >= x.low and a <= x.high]
    if not inside:
        return False
    if mark.style == "rewound":
        spans = [(_across(x, max(a, x.low)), _across(x, min(b, x.high))) for a, b in inside[:_MOST_MARKS]]
        d = "".join(f"M{a} 0H{max(b, round(a + 1.5, 1))}V{_SIZE}H{a}Z" for a, b in spans)
    else:
        every = math.ceil(len(inside) / _MOST_MARKS)
        d = "".join(f"M{_across(x, a)} {_SIZE - 25}h0" for a, _ in inside[::every])
    _add(svg, "path", d=d, style=f"mark {mark.style}")
    return True


def _across(axis: Axis, value: float) -> float:
    return round(_SIZE * axis.place(value), 1)


def _down(axis: Axis, value: float) -> int:
    return round(_SIZE * (1 - axis.place(value)))
