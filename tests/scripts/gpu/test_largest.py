"""The search for the largest model begins anywhere, and ends with one that goes."""

from __future__ import annotations

import pytest
from gpu.largest import Found, search


def found(*, fits: int, first: int, most: int = 1000) -> tuple[list[int], Found]:
    tried: list[int] = []

    def attempt(layers: int) -> str | None:
        tried.append(layers)
        return None if layers <= fits else "out of memory"

    *_, last = search(attempt, first=first, most=most)
    return tried, last


def test_blocks_are_added_by_a_quarter_until_they_do_not_go() -> None:
    assert found(fits=11, first=8) == ([8, 10, 12], Found(10, 12, "out of memory"))


def test_a_first_number_that_does_not_go_is_halved() -> None:
    assert found(fits=7, first=24) == ([24, 12, 6, 7, 8], Found(7, 8, "out of memory"))


def test_nothing_is_tried_twice_and_nothing_above_what_failed() -> None:
    assert found(fits=12, first=24)[0] == [24, 12, 15]


def test_where_not_even_one_block_goes_there_is_no_number() -> None:
    assert found(fits=0, first=4) == ([4, 2, 1], Found(None, 1, "out of memory"))


@pytest.mark.parametrize("most", [2, 3])
def test_more_than_was_asked_for_is_not_tried(most: int) -> None:
    tried, last = found(fits=100, first=2, most=most)
    assert tried == list(range(2, most + 1))
    assert (last.layers, last.reason) == (most, "it was not tried")
