"""Which units keep their states on the device."""

from __future__ import annotations

import pytest

from dsrun.choices.resident_units import room_at_ratio, units_that_stay


def test_the_rest_and_then_the_first_units_of_the_forward_stay() -> None:
    assert units_that_stay([4, 4, 4, 2], [True, True, True, False], 6) == (True, False, False, True)


def test_a_unit_that_is_too_large_makes_room_for_a_later_one() -> None:
    assert units_that_stay([2, 9, 3], [True] * 3, 5) == (True, False, True)


@pytest.mark.parametrize(("ratio", "room"), [(0.0, 10), (0.25, 8), (0.5, 5), (1.0, 0)])
def test_at_least_the_share_leaves(ratio: float, room: int) -> None:
    numels = [1, 2, 3, 4]
    assert room_at_ratio(numels, ratio) == room
    stays = units_that_stay(numels, [True] * 4, room)
    assert sum(numel for numel, one in zip(numels, stays, strict=True) if not one) >= ratio * 10
