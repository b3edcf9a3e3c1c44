"""Units take turns in slots; those that cannot share have one of their own."""

from __future__ import annotations

from dsrun.runtime.layout.slot_plan import plan_slots


def test_units_take_turns_and_slots_fit_their_largest_unit() -> None:
    plan = plan_slots([5, 3, 9, 4], [True] * 4, count=2)
    assert plan.slot_of == (0, 1, 0, 1)
    assert plan.numel == {0: 9, 1: 4}


def test_a_unit_that_does_not_share_has_its_own_slot() -> None:
    plan = plan_slots([5, 3, 9], [True, False, True], count=2)
    assert plan.slot_of == (0, 3, 0)
    assert plan.numel == {0: 9, 3: 3}


def test_with_a_slot_a_unit_nothing_is_shared() -> None:
    plan = plan_slots([1, 2, 3], [True, True, False], count=3)
    assert len(set(plan.slot_of)) == 3
    assert sorted(plan.numel.values()) == [1, 2, 3]


def test_no_units_need_no_slots() -> None:
    assert plan_slots([], [], count=2).numel == {}
