"""Boxes of a tensor: how a flat row-major range decomposes into them, and which of them a rank's tensor is made of.

A checkpoint describes every stored piece by its box, so that loading on another number of ranks, or under another
partitioning, is intersecting boxes. Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """A box: `offset[d] <= index[d] < offset[d] + shape[d]` in every dim d of a tensor.

    A scalar tensor has the one region `Region((), ())`.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside the box."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def relative_to(self, outer: Region) -> Region:
        """Returns this box in the coordinates of `outer`, which contains it."""
        return Region(tuple(o - p for o, p in zip(self.offset, outer.offset, strict=True)), self.shape)

    def shifted(self, offset: Sequence[int]) -> Region:
        """Returns the box whose coordinates in a box at `offset` are these; the inverse of `relative_to`."""
        return Region(tuple(o + p for o, p in zip(self.offset, offset, strict=True)), self.shape)

    def intersect(self, other: Region) -> Region | None:
        """Returns the common box, or None where there is no common element."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        stops = [
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Region(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


@dataclass(frozen=True, slots=True)
class TensorBoxes:
    """Where a rank's tensor lies in the whole one, of which it may be a part.

    A weight cut by columns of its product has one box on dim 0, one cut by rows a box on dim 1, and one that packs
    queries, keys and values a box for each of them.

    Attributes:
        shape: shape of the whole tensor.
        boxes: boxes of the whole tensor that do not overlap. The rank's tensor is their elements, box after box, each
            in row-major order.
    """

    shape: tuple[int, ...]
    boxes: tuple[Region, ...]

    @property
    def numel(self) -> int:
        """Elements of the rank's tensor."""
        return sum(box.numel for box in self.boxes)

    @property
    def is_cut(self) -> bool:
        """Whether the rank's tensor is anything but the whole one with its elements in order."""
        position = 0
        for box in self.boxes:
            if flat_range(self.shape, box) != (position, position + box.numel):
                return True
            position += box.numel
        return position != prod(self.shape)

    @property
    def first(self) -> int | None:
        """Position of the whole tensor's first element in the rank's tensor; None where another rank has it."""
        position = 0
        for box in self.boxes:
            if not any(box.offset):
                return position
            position += box.numel
        return None

    def regions(self, start: int, stop: int) -> list[Region]:
        """Cuts the elements [start, stop) of the rank's tensor into boxes of the whole one.

        Their elements one after the other are those of the range; each box is contiguous in the box it is cut from.

        Args:
            start: first element, 0 <= start <= stop.
            stop: one past the last element, stop <= numel.
        """
        assert 0 <= start <= stop <= self.numel, f"range [{start}, {stop}) does not fit {self}"
        found: list[Region] = []
        position = 0
        for box in self.boxes:
            low, high = max(start - position, 0), min(stop - position, box.numel)
            if low < high:
                found += [part.shifted(box.offset) for part in regions_of_flat_range(box.shape, low, high)]
            position += box.numel
        return found


def uncut(shape: Sequence[int]) -> TensorBoxes:
    """Returns the one box of a rank that has the whole tensor; no box where that has no elements."""
    return TensorBoxes(tuple(shape), (whole(shape),) if prod(shape) else ())


def whole(shape: Sequence[int]) -> Region:
    """Returns the box of a whole tensor of `shape`."""
    return Region((0,) * len(shape), tuple(shape))


def flat_range(shape: Sequence[int], box: Region) -> tuple[int, int] | None:
    """Returns the row-major elements [start, stop) of a box, or None where they are no single run.

    Args:
        shape: shape of the tensor.
        box: box of the tensor, with at least one element.
    """
    dim = next((d for d, n in enumerate(box.shape) if n > 1), len(shape))
    if any(n != size for n, size in zip(box.shape[dim + 1 :], shape[dim + 1 :], strict=True)):
        return None
    start = 0
    for offset, size in zip(box.offset, shape, strict=True):
        start = start * size + offset
    return start, start + box.numel


def regions_of_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Cuts the row-major elements [start, stop) of a tensor into boxes.

    The boxes come in row-major order, and each is contiguous in row-major order too, so the elements of the range are
    the concatenation of the boxes' elements. There are at most 2 * len(shape) - 1 of them.

    Args:
        shape: the tensor's shape.
        start: first element, 0 <= start <= stop.
        stop: one past the last element, stop <= prod(shape).
    """
    assert 0 <= start <= stop <= prod(shape), f"range [{start}, {stop}) does not fit shape {tuple(shape)}"
    if start == stop:
        return []
    if len(shape) == 0:
        return [Region((), ())]
    row = prod(shape[1:])
    if len(shape) == 1 or row == 1:
        tail = tuple(shape[1:])
        return [Region((start, *([0] * len(tail))), (stop - start, *tail))]
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _inside_row(shape, first, start - first * row, stop - first * row)
    regions: list[Region] = []
    if start > first * row:
        regions += _inside_row(shape, first, start - first * row, row)
        first += 1
    full_stop = stop // row
    if full_stop > first:
        regions.append(Region((first, *([0] * (len(shape) - 1))), (full_stop - first, *shape[1:])))
    if stop > full_stop * row:
        regions += _inside_row(shape, full_stop, 0, stop - full_stop * row)
    return regions


def _inside_row(shape: Sequence[int], index: int, start: int, stop: int) -> list[Region]:
    """Boxes of the elements [start, stop) of row `index`."""
    inner = regions_of_flat_range(shape[1:], start, stop)
    return [Region((index, *region.offset), (1, *region.shape)) for region in inner]
