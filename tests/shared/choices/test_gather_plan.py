"""Units take turns in slots, as many as budgets allow; small parts stay; who cannot share has a slot of its own."""

from __future__ import annotations

import pytest

from dsrun.choices.gather_plan import (
    GatherBudgets,
    GatherPlan,
    ResidentParts,
    UnitElements,
    choose_staying,
    plan_gathering,
    plan_slots,
)


def block(numel: int, frozen: int = 0) -> UnitElements:
    return UnitElements(numel, numel, frozen, frozen)


def rest(numel: int) -> UnitElements:
    return UnitElements(numel, numel, has_module=False)


def turns(units: list[UnitElements], budgets: GatherBudgets) -> GatherPlan:
    return plan_gathering(units, [stays.trained for stays in choose_staying(units, budgets)], budgets)


def test_those_that_share_take_turns_and_slots_fit_the_largest() -> None:
    plan = plan_slots([5, 3, 9, 4], [True] * 4, count=2)
    assert plan.slot_of == (0, 1, 0, 1)
    assert plan.numel == {0: 9, 1: 4}


def test_one_that_does_not_share_has_its_own_slot_and_neighbours_still_take_turns() -> None:
    plan = plan_slots([5, 3, 9], [True, False, True], count=2)
    assert plan.slot_of == (0, 3, 1)
    assert plan.numel == {0: 5, 3: 3, 1: 9}


def test_with_a_slot_a_unit_nothing_is_shared() -> None:
    plan = plan_slots([1, 2, 3], [True, True, False], count=3)
    assert len(set(plan.slot_of)) == 3
    assert sorted(plan.numel.values()) == [1, 2, 3]


def test_no_units_need_no_slots() -> None:
    assert plan_slots([], [], count=2).numel == {}
    assert turns([], GatherBudgets(ahead=5)).numel == 0


@pytest.mark.parametrize(
    ("ahead", "slots"), [(None, 2), (0, 1), (1, 2), (100, 2), (199, 2), (200, 3), (300, 4), (10**9, 6)]
)
def test_units_are_gathered_as_far_ahead_as_the_largest_fits_but_one_at_least(ahead: int | None, slots: int) -> None:
    units = [block(100), block(40), block(100), block(70), block(10), block(10), rest(1000)]
    assert turns(units, GatherBudgets(ahead=ahead)).slot_count == slots


def test_slots_together_hold_no_more_than_may_be_live_unless_one_is_more_already() -> None:
    units = [*[block(100)] * 8, rest(50)]
    for live in range(40, 1000, 10):
        plan = turns(units, GatherBudgets(ahead=500, live=live))
        assert plan.slot_count == min(6, max(1, (live - 50) // 100))
        assert plan.numel == 50 + 100 * plan.slot_count
    assert turns(units, GatherBudgets(live=200)).slot_count == 1, "the usual two are cut down as well"


def test_trained_and_frozen_parameters_of_a_module_share_its_turn() -> None:
    plan = turns([block(10, 90), block(0, 60), block(30)], GatherBudgets())
    assert [(cell.unit, cell.trained, cell.frozen, cell.numel) for cell in plan.cells] == [
        (0, True, True, 100),
        (1, False, True, 60),
        (2, True, False, 30),
    ]
    assert plan.slots.numel == {0: 100, 1: 60}


def test_small_parts_stay_in_order_until_their_total_is_reached() -> None:
    units = [block(10, 90), block(11), block(0, 5), block(8), rest(1)]
    budgets = GatherBudgets(stay=10, stay_total=16)
    assert choose_staying(units, budgets) == [
        ResidentParts(trained=True),
        ResidentParts(),
        ResidentParts(frozen=True),
        ResidentParts(),  # 8 more are too many
        ResidentParts(),  # has a slot of its own anyway
    ]
    assert choose_staying(units, GatherBudgets()) == [ResidentParts()] * 5


def test_what_stays_has_a_slot_of_its_own_beside_the_turns() -> None:
    plan = turns([block(10, 90), block(10, 80), block(70)], GatherBudgets(stay=10))
    assert [(cell.numel, cell.shares) for cell in plan.cells] == [
        (90, True),
        (10, False),
        (80, True),
        (10, False),
        (70, True),
    ]
    assert plan.numel == 90 + 80 + 10 + 10
