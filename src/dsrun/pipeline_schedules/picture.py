"""Pictures of schedules: an SVG for guides, a table of plain text for terminals. Nothing is computed but places.

They can be read without colour: each box has its letter and number, and each kind its own lightness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import fill

from .actions import COMPUTES, Action, Kind, Schedule
from .generate import ScheduleName, make_schedule
from .simulate import Timeline, equal_costs, simulate

#: Fill and ink of each kind, from light to dark.
_COLOURS = {
    Kind.FORWARD: ("#dbe9f6", "#10263d"),
    Kind.BACKWARD: ("#5b93c7", "#ffffff"),
    Kind.INPUT_GRADS: ("#8ab6dc", "#10263d"),
    Kind.WEIGHT_GRADS: ("#1f4e79", "#ffffff"),
}
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADS: "gradients of inputs",
    Kind.WEIGHT_GRADS: "gradients of weights",
}
_LEFT, _TOP, _ROW, _GAP = 64, 34, 30, 6
#: Widest picture, and width of the time of a forward where there is room.
_WIDTH, _UNIT = 1600, 28
#: Columns of a terminal.
_COLUMNS = 120
#: Most computations of a picture: an SVG takes about 180 bytes for each, so it stays below 2 MB.
MOST_BOXES = 10_000


def most_micros(name: ScheduleName, *, ranks: int, virtual: int) -> int:
    """Returns the most micro batches of which a picture has no more than `MOST_BOXES`; at least as many as ranks.

    With fewer than ranks no picture shows what a schedule is for. Whole rounds, for the schedules that take no others.

    Args:
        name: name of the schedule.
        ranks: ranks of the pipeline.
        virtual: chunks of a rank.
    """
    one_each = make_schedule(name, ranks=ranks, micros=ranks, virtual=virtual)
    return max(1, MOST_BOXES // sum(map(len, one_each.actions))) * ranks


def svg_of(drawn: Timeline | Schedule) -> str:
    """Returns a picture of what each rank does and when, as SVG.

    Boxes show a letter for the kind and the number of the micro batch, and below it the chunk where ranks have
    several; white is waiting. A box that is too narrow for its text has it as a title.

    Args:
        drawn: timeline, or a schedule that is drawn with one unit of time for a forward and for each part of a
            backward.
    """
    timeline = _timeline(drawn)
    schedule = timeline.schedule
    scale = min(_UNIT / _unit(timeline), (_WIDTH - _LEFT - 10) / max(timeline.seconds, 1e-30))
    width = _LEFT + timeline.seconds * scale + 10
    height = _TOP + schedule.ranks * (_ROW + _GAP) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560):.0f}" height="{height}" '
        f'viewBox="0 0 {max(width, 560):.0f} {height}" role="img" font-family="sans-serif">',
        f"<title>{escape(_caption(timeline))}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="13" fill="#10263d">{escape(_caption(timeline))}</text>',
    ]
    for rank in range(schedule.ranks):
        lines += _svg_row(timeline, rank, scale)
    lines += _legend(schedule, height - 22)
    return "\n".join((*lines, "</svg>", ""))


def text_of(schedule: Schedule, *, columns: int = _COLUMNS) -> str:
    """Returns what each rank does and when, as lines of plain text; waiting is blank, a longer action has dashes.

    What is longer than a line goes on in a further block below. A unit of time is a forward or a part of a backward.

    Args:
        schedule: schedule to show.
        columns: width of a line at most.
    """
    timeline = _timeline(schedule)
    units = round(timeline.seconds)
    cells = [[""] * units for _ in range(schedule.ranks)]
    for rank, start, end, action in _boxes(timeline):
        first, last = round(start), round(end)
        cells[rank][first] = _label(schedule, action)
        cells[rank][first + 1 : last] = ["-"] * (last - first - 1)
    wide = max((len(cell) for row in cells for cell in row), default=1) + 1
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    left = max(map(len, names)) + 2
    each = max(1, (columns - left) // wide)
    blocks: list[str] = []
    for start in range(0, units, each):
        shown = range(start, min(start + each, units))
        lines = ["time".ljust(left) + "".join(f"{at}".ljust(wide) for at in shown)]
        for name, row in zip(names, cells, strict=True):
            lines.append(
                name.ljust(left)
                + "".join(("-" * (wide - 1) if row[at] == "-" else row[at]).ljust(wide) for at in shown)
            )
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join((*blocks, fill(_caption(timeline), columns))) + "\n"


def _timeline(drawn: Timeline | Schedule) -> Timeline:
    return simulate(drawn, equal_costs(drawn.chunks)) if isinstance(drawn, Schedule) else drawn


def _boxes(timeline: Timeline) -> Iterator[tuple[int, float, float, Action]]:
    """Yields rank, begin, end and action of each computation."""
    for rank, row in enumerate(timeline.schedule.actions):
        for start, end, action in zip(timeline.starts[rank], timeline.ends[rank], row, strict=True):
            if action.kind in COMPUTES:
                yield rank, start, end, action


def _unit(timeline: Timeline) -> float:
    """Returns the shortest time that a computation takes."""
    return min((end - start for _, start, end, _ in _boxes(timeline) if end > start), default=1.0)


def _label(schedule: Schedule, action: Action) -> str:
    return f"{action.kind.value}{action.micro}" if schedule.chunks == schedule.ranks else str(action)


def _caption(timeline: Timeline) -> str:
    schedule = timeline.schedule
    each = schedule.chunks // schedule.ranks
    chunks = f", {each} chunks each" if each > 1 else ""
    ranks = f"{schedule.ranks} rank{'s' if schedule.ranks > 1 else ''}"
    waits = f"ranks wait {timeline.bubble_share:.1%} of a step"
    return f"{schedule.name}: {ranks}{chunks}, {schedule.micros} micro batches; {waits}"


def _svg_row(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    """Yields the boxes of a rank."""
    schedule = timeline.schedule
    several = schedule.chunks > schedule.ranks
    top = _TOP + rank * (_ROW + _GAP)
    place = f'x="{_LEFT - 8}" y="{top + 19}" text-anchor="end"'
    yield f'<text {place} font-size="12" fill="#10263d">rank {rank}</text>'
    yield (
        f'<rect x="{_LEFT}" y="{top}" width="{timeline.seconds * scale:.2f}" height="{_ROW}" fill="#ffffff" '
        'stroke="#b8c4d0" stroke-dasharray="2 3"/>'
    )
    for start, end, action in zip(timeline.starts[rank], timeline.ends[rank], schedule.actions[rank], strict=True):
        if action.kind not in COMPUTES or end <= start:
            continue
        ground, ink = _COLOURS[action.kind]
        x, width = _LEFT + start * scale, (end - start) * scale
        title = f"{_WORDS[action.kind]} of micro batch {action.micro}, chunk {action.chunk}: {start:g} to {end:g}"
        yield (
            f'<g><title>{title}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}" fill="{ground}" '
            f'stroke="#10263d" stroke-width="{min(0.6, width / 12):.2g}"/>'
        )
        label = f"{action.kind.value}{action.micro}"
        if width >= 7 * len(label):
            yield _centred(label, x + width / 2, top + (14 if several else 19), 11, ink)
        if several and width >= 6 * len(f"c{action.chunk}"):
            yield _centred(f"c{action.chunk}", x + width / 2, top + 25, 8, ink)
        yield "</g>"


def _centred(text: str, x: float, y: float, size: int, ink: str) -> str:
    return f'<text x="{x:.2f}" y="{y}" text-anchor="middle" font-size="{size}" fill="{ink}">{text}</text>'


def _legend(schedule: Schedule, top: float) -> Iterator[str]:
    """Yields what the boxes mean."""
    kinds = {action.kind for row in schedule.actions for action in row}
    x = float(_LEFT)
    shown: Sequence[Kind] = [kind for kind in COMPUTES if kind in kinds]
    for kind in shown:
        ground, ink = _COLOURS[kind]
        yield (
            f'<rect x="{x:.0f}" y="{top}" width="20" height="15" fill="{ground}" stroke="#10263d" stroke-width="0.6"/>'
        )
        yield _centred(kind.value, x + 10, top + 11.5, 10, ink)
        yield (f'<text x="{x + 25:.0f}" y="{top + 12}" font-size="11" fill="#10263d">{_WORDS[kind]}</text>')
        x += 45 + 6.2 * len(_WORDS[kind])
