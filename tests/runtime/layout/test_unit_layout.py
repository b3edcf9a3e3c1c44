"""A unit's flat buffer: aligned, cut evenly, with tensors at places that do not depend on the number of ranks."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.checkpoint_files.index.region import Region, TensorBoxes, uncut
from dsrun.errors import LayoutError
from dsrun.runtime.layout.unit_layout import SHARD_ALIGN, TENSOR_ALIGN, UnitLayout, lay_out

TENSORS = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6)


def layout_of(shapes: list[tuple[int, ...]], world_size: int) -> UnitLayout:
    return lay_out("unit", [(str(i), shape) for i, shape in enumerate(shapes)], world_size=world_size)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.sampled_from([*range(1, 10), 4096]))
def test_every_element_has_one_place_and_one_owner(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = layout_of(shapes, world_size)
    assert layout.shard_numel % SHARD_ALIGN == 0
    assert layout.padded_numel == layout.shard_numel * world_size >= layout.numel
    assert layout.padded_numel - layout.numel < world_size * SHARD_ALIGN
    end = 0
    for extent, shape in zip(layout.extents, shapes, strict=True):
        assert extent.offset % TENSOR_ALIGN == 0
        assert extent.offset >= end
        assert extent.numel == prod(shape)
        end = extent.offset + extent.numel
    assert layout.numel == end

    owned: dict[str, list[tuple[int, int]]] = {extent.name: [] for extent in layout.extents}
    last = 0
    for rank in range(world_size):
        start, stop = layout.shard_range(rank)
        assert start == last
        last = stop
        if start >= layout.numel:
            assert layout.pieces(start, stop) == []
            continue
        for piece in layout.pieces(start, stop):
            assert start + piece.shard_offset == piece.extent.offset + piece.start
            owned[piece.extent.name].append((piece.start, piece.stop))
    assert last == layout.padded_numel
    for extent in layout.extents:
        bounds = owned[extent.name]
        assert [a for a, _ in bounds[1:]] == [b for _, b in bounds[:-1]]
        if extent.numel:
            assert (bounds[0][0], bounds[-1][1]) == (0, extent.numel)
        else:
            assert bounds == []


@settings(max_examples=30, deadline=None)
@given(TENSORS)
def test_places_do_not_depend_on_the_number_of_ranks(shapes: list[tuple[int, ...]]) -> None:
    assert len({layout_of(shapes, size).extents for size in (1, 2, 3, 7, 4096)}) == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_unit_without_elements_has_an_empty_buffer(world_size: int) -> None:
    layout = layout_of([(0, 3), (0,)], world_size)
    assert (layout.numel, layout.padded_numel) == (0, 0)
    assert layout.pieces(0, 0) == []


COLUMN = TensorBoxes((8, 6), (Region((4, 0), (4, 6)),))
ROW = TensorBoxes((6, 8), (Region((0, 4), (6, 4)),))
PACKED = TensorBoxes((12, 6), tuple(Region((row, 0), (2, 6)) for row in (2, 6, 10)))


def test_an_extent_knows_which_part_of_the_whole_tensor_it_is() -> None:
    tensors = [("up", (4, 6)), ("down", (6, 4)), ("qkv", (6, 6)), ("norm", (6,)), ("gain", ())]
    layout = lay_out("block", tensors, world_size=2, cut={"up": COLUMN, "down": ROW, "qkv": PACKED})
    assert [extent.whole for extent in layout.extents] == [COLUMN, ROW, PACKED, uncut((6,)), uncut(())]
    plain = lay_out("block", tensors, world_size=2)
    assert [(e.name, e.shape, e.offset) for e in layout.extents] == [(e.name, e.shape, e.offset) for e in plain.extents]
    assert [extent.whole for extent in plain.extents] == [uncut(shape) for _, shape in tensors]


@pytest.mark.parametrize(
    ("shape", "part", "words"),
    [
        ((4, 5), COLUMN, r"have 24 elements, and its part of shape \(4, 5\) has 20"),
        ((4, 6), TensorBoxes((7, 6), COLUMN.boxes), "leaves a tensor"),
        ((8, 6), TensorBoxes((8, 6), (*COLUMN.boxes, Region((2, 0), (4, 6)))), "overlap"),
        ((4, 6), TensorBoxes((8, 6), (Region((4,), (24,)),)), "none of a tensor"),
        ((4, 6), TensorBoxes((8, 6), (Region((-4, 0), (4, 6)),)), "none of a tensor"),
        ((0, 6), TensorBoxes((8, 6), (Region((4, 0), (0, 6)),)), "no elements"),
    ],
)
def test_a_part_that_is_none_of_the_whole_tensor_is_refused(
    shape: tuple[int, ...], part: TensorBoxes, words: str
) -> None:
    with pytest.raises(LayoutError, match=f"`w` is cut wrongly: .*{words}"):
        lay_out("block", [("w", shape)], world_size=1, cut={"w": part})


def test_a_rank_may_have_nothing_of_a_tensor() -> None:
    layout = lay_out("block", [("w", (0, 6))], world_size=1, cut={"w": TensorBoxes((8, 6), ())})
    assert layout.extents[0].whole.is_cut
