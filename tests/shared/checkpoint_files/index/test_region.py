"""Flat ranges decompose into boxes that cover them once, in order."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.checkpoint_files.index.region import Region, regions_of_flat_range, whole

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
