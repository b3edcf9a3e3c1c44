"""Do boxes lie in a tensor, none over another, and do they cover it? Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from .region import Region, flat_range

#: Pairs of boxes that are compared at most; a real checkpoint needs a few for each box.
_MOST_PAIRS = 1_000_000


def wrong_cover(shape: Sequence[int], boxes: Sequence[Region]) -> str | None:
    """Returns what is wrong with the boxes of a tensor, or None where each element lies in one.

    Args:
        shape: shape of the tensor.
        boxes: boxes of the tensor, with as many dimensions as `shape`, and offsets and sizes that are not negative.
    """
    wrong = _misplaced(shape, boxes)
    if wrong is not None:
        return wrong
    covered, numel = sum(box.numel for box in boxes), prod(shape)
    if covered != numel:
        return f"the boxes have {covered} elements together, and the tensor has {numel}"
    return _overlap(shape, boxes)


def wrong_parts(shape: Sequence[int], boxes: Sequence[Region]) -> str | None:
    """Returns what is wrong with boxes that need not cover a tensor, or None where each element lies in one at most.

    Args:
        shape: shape of the tensor.
        boxes: boxes of the tensor, see `wrong_cover`.
    """
    return _misplaced(shape, boxes) or _overlap(shape, boxes)


def _misplaced(shape: Sequence[int], boxes: Sequence[Region]) -> str | None:
    """Returns which box leaves its tensor, or has no elements."""
    for box in boxes:
        if any(o + n > size for o, n, size in zip(box.offset, box.shape, shape, strict=True)):
            return f"the box of {box.shape} at {box.offset} leaves a tensor of {tuple(shape)}"
        if box.numel == 0:
            return f"the box at {box.offset} has no elements"
    return None


def _overlap(shape: Sequence[int], boxes: Sequence[Region]) -> str | None:
    """Returns which two boxes inside a tensor overlap."""
    ranges = [flat_range(shape, box) for box in boxes]
    if all(flat is not None for flat in ranges):
        # As ranks that cut a flat buffer store it: intervals, which sorting tells apart.
        runs = [(flat, box) for flat, box in zip(ranges, boxes, strict=True) if flat is not None]
        ordered = sorted(runs, key=lambda run: run[0])
        for (before, first), (after, second) in pairwise(ordered):
            if after[0] < before[1]:
                return _told(first, second)
        return None
    # A sweep along the first dim; only boxes that share a row of it are compared.
    pairs = 0
    active: list[Region] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        active = [other for other in active if other.offset[0] + other.shape[0] > box.offset[0]]
        pairs += len(active)
        if pairs > _MOST_PAIRS:
            return f"{len(boxes)} boxes that lie beside each other are too many to be compared"
        for other in active:
            if _share(other, box):
                return _told(other, box)
        active.append(box)
    return None


def _share(one: Region, other: Region) -> bool:
    sides = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)


def _told(first: Region, second: Region) -> str:
    return f"the box of {first.shape} at {first.offset} and the one of {second.shape} at {second.offset} overlap"
