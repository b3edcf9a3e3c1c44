"""Pieces of tensors are cut at equal blocks without a gap or an overlap."""

from __future__ import annotations

import pytest

from dsrun.runtime.optim.structure.blocks import BlockPart, block_parts, cell_width


def test_a_piece_has_a_part_of_a_block_whole_ones_and_a_part() -> None:
    assert block_parts(7, 26, 5) == [BlockPart(1, 1, 0, 3), BlockPart(2, 3, 3, 5), BlockPart(5, 1, 18, 1)]
    assert block_parts(6, 9, 10) == [BlockPart(0, 1, 0, 3)]
    assert block_parts(0, 10, 10) == [BlockPart(0, 1, 0, 10)]
    assert block_parts(4, 4, 3) == []


@pytest.mark.parametrize("size", [1, 3, 64, 100])
def test_parts_cover_the_piece(size: int) -> None:
    for start in range(0, 40, 7):
        for stop in range(start, 130, 11):
            covered = [
                (start + part.offset + i * part.length, part.first + i, part.length)
                for part in block_parts(start, stop, size)
                for i in range(part.count)
            ]
            position = start
            for first, block, length in covered:
                assert first == position
                assert block * size <= first < first + length <= (block + 1) * size
                position += length
            assert position == stop


@pytest.mark.parametrize(("size", "width"), [(4096, 64), (72, 8), (61, 1), (64, 64), (32, 32)])
def test_cells_divide_blocks(size: int, width: int) -> None:
    assert cell_width(size) == width
