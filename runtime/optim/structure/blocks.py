"""A tensor cut into equal blocks (rows, heads), and the parts of blocks inside a piece of it. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ...layout.unit_layout import TENSOR_ALIGN


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Neighbouring blocks of which a piece holds equal parts: all of each, or a part of one.

    Attributes:
        first: number of the first block in its tensor.
        count: blocks.
        offset: first element of the first block, counted from the start of the piece.
        length: elements of each.
    """

    first: int
    count: int
    offset: int
    length: int


def block_parts(start: int, stop: int, size: int) -> list[BlockPart]:
    """Cuts the elements [start, stop) of a tensor at its blocks of `size` elements: up to three parts.

    Args:
        start: first element of the piece.
        stop: one past the last.
        size: elements of a block.
    """
    parts: list[BlockPart] = []
    position = start
    if position % size and position < stop:
        end = min(stop, (position // size + 1) * size)
        parts.append(BlockPart(position // size, 1, 0, end - position))
        position = end
    whole = (stop - position) // size
    if whole:
        parts.append(BlockPart(position // size, whole, position - start, size))
        position += whole * size
    if position < stop:
        parts.append(BlockPart(position // size, 1, position - start, stop - position))
    return parts


def cell_width(size: int) -> int:
    """Returns the largest cell, of up to 64 elements, that divides blocks of `size` elements and no cut divides.

    Pieces begin at multiples of 64 elements of their tensor, so a power of two that divides the block does.
    """
    return gcd(size, TENSOR_ALIGN)
