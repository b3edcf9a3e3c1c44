"""Numbers made fit to be drawn: thinned, smoothed, averaged. Pure; spikes stay.

A curve is a list of pieces, each a list of points: it is broken where a number is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]
Piece = list[Point]

#: Points of a curve: more than a screen has columns.
MOST_POINTS = 2000


def thin(xs: Sequence[float], ys: Sequence[float], *, most: int = MOST_POINTS) -> list[Piece]:
    """Returns a curve of about so many points; of each range of neighbours the least and the most are kept.

    Args:
        xs: Places, rising.
        ys: Values at these; NaN where one is missing.
        most: Number of points that are about to be left.
    """
    count = len(xs)
    width = 1 if count <= most else math.ceil(count / (most / 2))
    pieces: list[Piece] = []
    piece: Piece = []
    for begin in range(0, count, width):
        places = [at for at in range(begin, min(begin + width, count)) if math.isfinite(ys[at])]
        if not places:
            if piece:
                pieces.append(piece)
            piece = []
            continue
        kept = {min(places, key=ys.__getitem__), max(places, key=ys.__getitem__)}
        piece += [(xs[at], ys[at]) for at in sorted(kept)]
    return [*pieces, piece] if piece else pieces


def smoothed(ys: Sequence[float], window: int) -> list[float]:
    """Returns at each place the mean of about so many values around it; farther ones count less and less.

    It goes forth and back, so that a curve that falls is not drawn late.

    Args:
        ys: Values; NaN where one is missing, and there the mean stays as it was.
        window: Number of values.
    """
    forth = _decayed(ys, window / 2)
    return _decayed(forth[::-1], window / 2)[::-1]


def _decayed(ys: Sequence[float], window: float) -> list[float]:
    keep = 1 - 1 / max(1.0, window)
    means: list[float] = []
    total, weight = 0.0, 0.0
    isfinite = math.isfinite
    for value in ys:
        if isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight if weight else math.nan)
    return means


def bucket_means(ys: Sequence[float], buckets: int) -> list[float]:
    """Returns the means of so many ranges of neighbours, or fewer; NaN where all values of one are missing.

    Args:
        ys: Values; NaN where one is missing.
        buckets: Number of ranges.
    """
    return [mean(ys[begin:end]) for begin, end in bucket_bounds(len(ys), buckets)]


def bucket_bounds(count: int, buckets: int) -> list[tuple[int, int]]:
    """Returns where each of so many ranges of about equal length begins and ends; fewer where there are fewer values.

    Args:
        count: Number of values.
        buckets: Number of ranges.
    """
    buckets = min(count, buckets)
    return [(at * count // buckets, (at + 1) * count // buckets) for at in range(buckets)]


def mean(ys: Sequence[float]) -> float:
    """Returns the mean of the values that are there; NaN where none is."""
    known = [value for value in ys if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def median(ys: Sequence[float]) -> float:
    """Returns the middle of the values that are there; NaN where none is."""
    known = sorted(value for value in ys if math.isfinite(value))
    if not known:
        return math.nan
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
