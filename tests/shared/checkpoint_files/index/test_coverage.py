"""Boxes cover a tensor once: whatever else they do is named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.checkpoint_files.index.coverage import wrong_cover, wrong_parts
from dsrun.checkpoint_files.index.region import Region, regions_of_flat_range, whole


@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.integers(0, 700), max_size=5))
def test_cuts_of_a_flat_tensor_cover_it(shape: list[int], cuts: list[int]) -> None:
    numel = whole(shape).numel
    marks = sorted({0, numel, *(cut % (numel + 1) for cut in cuts)})
    boxes = [box for a, b in pairwise(marks) for box in regions_of_flat_range(shape, a, b)]
    assert wrong_cover(shape, boxes) is None
    assert wrong_cover(shape, boxes[::-1]) is None
    assert wrong_cover(shape, boxes[1:]) is not None
    assert wrong_cover(shape, [*boxes, boxes[0]]) is not None


def test_columns_cover_a_matrix() -> None:
    assert wrong_cover((4, 6), [Region((0, 0), (4, 3)), Region((0, 3), (4, 3))]) is None


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([Region((0, 0), (4, 3)), Region((0, 2), (4, 3))], "overlap"),
        ([Region((0, 0), (4, 3)), Region((0, 4), (4, 3))], "leaves a tensor of"),
        ([Region((0, 0), (2, 6)), Region((1, 0), (2, 6))], "overlap"),
        ([Region((0, 0), (4, 6)), Region((4, 0), (0, 6))], "has no elements"),
        ([], "have 0 elements together, and the tensor has 24"),
    ],
)
def test_what_does_not_cover_is_named(boxes: list[Region], said: str) -> None:
    assert said in str(wrong_cover((4, 6), boxes))


def test_too_many_boxes_beside_each_other_end_in_a_word_and_not_in_hours() -> None:
    boxes = [Region((0, column), (2, 1)) for column in range(1500)]
    assert "too many to be compared" in str(wrong_cover((2, 1500), boxes))


def test_parts_need_not_cover_a_tensor_but_lie_in_it_once() -> None:
    left, right = Region((0, 0), (4, 2)), Region((0, 2), (4, 2))
    assert wrong_parts((4, 4), [left]) is None
    assert wrong_parts((4, 4), [right, left]) is None
    assert "overlap" in str(wrong_parts((4, 4), [left, Region((3, 1), (1, 1))]))
    assert "leaves a tensor" in str(wrong_parts((4, 3), [right]))
    assert "no elements" in str(wrong_parts((4, 4), [Region((0, 0), (0, 4))]))
