"""Flat ranges decompose into boxes that cover them once, in order."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.checkpoint_files.index.region import Region, TensorBoxes, flat_range, regions_of_flat_range, uncut, whole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@settings(max_examples=300, deadline=None)
@given(ranges())
def test_boxes_of_a_flat_range_are_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers = torch.arange(prod(shape)).view(shape)
    regions = regions_of_flat_range(shape, start, stop)
    assert len(regions) <= max(1, 2 * len(shape) - 1)
    parts = [numbers[region.slices].reshape(-1) for region in regions]
    assert torch.equal(torch.cat([numbers.new_empty(0), *parts]), torch.arange(start, stop))
    for region in regions:
        assert region.numel > 0
        assert numbers[region.slices].is_contiguous()
        assert region.intersect(whole(shape)) == region
        assert region.relative_to(region) == whole(region.shape)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 7), st.integers(1, 7))
def test_any_two_cuts_of_a_tensor_intersect_to_each_element_once(shape: tuple[int, ...], left: int, right: int) -> None:
    def cut(parts: int) -> list[Region]:
        size = prod(shape)
        bounds = [size * i // parts for i in range(parts + 1)]
        return [r for a, b in itertools.pairwise(bounds) for r in regions_of_flat_range(shape, a, b)]

    seen = torch.zeros(shape, dtype=torch.int64)
    for a in cut(left):
        for b in cut(right):
            common = a.intersect(b)
            assert common == b.intersect(a)
            if common is not None:
                seen[common.slices] += 1
    assert bool((seen == 1).all())


def test_a_scalar_is_one_box() -> None:
    assert regions_of_flat_range((), 0, 1) == [Region((), ())]
    assert regions_of_flat_range((), 0, 0) == []
    assert Region((), ()).numel == 1
    assert Region((), ()).intersect(Region((), ())) == Region((), ())


def test_a_range_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        regions_of_flat_range((2, 3), 0, 7)


@st.composite
def parts(draw: st.DrawFn) -> TensorBoxes:
    """Some boxes of a tensor that do not overlap, in any order: whole slabs along one dim, cut along another."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    dim, other = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1))
    marks = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=shape[dim] + 1)) | {shape[dim]})
    boxes: list[Region] = []
    for low, high in itertools.pairwise(marks):
        offset, size = [0] * len(shape), list(shape)
        offset[dim], size[dim] = low, high - low
        if other != dim:
            offset[other] = draw(st.integers(0, shape[other] - 1))
            size[other] = draw(st.integers(1, shape[other] - offset[other]))
        boxes.append(Region(tuple(offset), tuple(size)))
    return TensorBoxes(shape, tuple(draw(st.permutations(boxes))))


def values_of(part: TensorBoxes) -> torch.Tensor:
    """The rank's tensor, flat, of a whole one that counts its elements."""
    numbers = torch.arange(prod(part.shape)).view(part.shape)
    return torch.cat([numbers.new_empty(0), *(numbers[box.slices].reshape(-1) for box in part.boxes)])


@settings(max_examples=400, deadline=None)
@given(parts(), st.data())
def test_a_range_of_a_ranks_tensor_is_boxes_of_the_whole_one(part: TensorBoxes, data: st.DataObject) -> None:
    numbers = torch.arange(prod(part.shape)).view(part.shape)
    start = data.draw(st.integers(0, part.numel))
    stop = data.draw(st.integers(start, part.numel))
    regions = part.regions(start, stop)
    found = [numbers[region.slices].reshape(-1) for region in regions]
    assert torch.equal(torch.cat([numbers.new_empty(0), *found]), values_of(part)[start:stop])
    assert len(regions) <= len(part.boxes) * max(1, 2 * len(part.shape) - 1)
    assert all(region.numel > 0 for region in regions)
    assert all(any(region.intersect(box) == region for box in part.boxes) for region in regions)


@settings(max_examples=200, deadline=None)
@given(parts())
def test_a_part_knows_whether_it_is_cut_and_where_the_first_element_is(part: TensorBoxes) -> None:
    values = values_of(part)
    assert part.numel == values.numel()
    assert part.is_cut != torch.equal(values, torch.arange(prod(part.shape)))
    assert part.first == (values.tolist().index(0) if 0 in values else None)


@given(SHAPES)
def test_a_whole_tensor_is_one_box_that_is_not_cut(shape: tuple[int, ...]) -> None:
    part = uncut(shape)
    assert not part.is_cut
    assert (part.numel, len(part.boxes)) == (prod(shape), 1 if prod(shape) else 0)
    assert part.first == (0 if prod(shape) else None)
    assert part.regions(0, prod(shape)) == ([whole(shape)] if prod(shape) else [])


def test_a_packed_weight_of_one_rank_is_not_cut() -> None:
    packed = TensorBoxes((6, 4), tuple(Region((row, 0), (2, 4)) for row in (0, 2, 4)))
    assert not packed.is_cut
    assert TensorBoxes((6, 4), packed.boxes[::-1]).is_cut


def test_a_range_outside_of_a_ranks_tensor_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        TensorBoxes((4, 4), (Region((0, 0), (4, 2)),)).regions(0, 9)


@settings(max_examples=200, deadline=None)
@given(parts())
def test_a_box_is_one_flat_range_where_its_elements_are_neighbours(part: TensorBoxes) -> None:
    numbers = torch.arange(prod(part.shape)).view(part.shape)
    for box in part.boxes:
        elements = numbers[box.slices].reshape(-1).tolist()
        is_run = elements == list(range(elements[0], elements[-1] + 1))
        assert flat_range(part.shape, box) == ((elements[0], elements[-1] + 1) if is_run else None)
        assert whole(box.shape).shifted(box.offset) == box
