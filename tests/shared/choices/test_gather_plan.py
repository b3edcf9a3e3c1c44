"""Units take turns in slots, as many as budgets allow; small parts stay; who cannot share has a slot of its own."""

from __future__ import annotations

import pytest

from dsrun.choices.gather_plan import (
    GatherBudgets,
    GatherPlan,
    ResidentParts,
    UnitElements,
    choose_staying,
    plan_chunks,
    plan_gathering,
    plan_slots,
    slots_of_chunks,
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


def test_of_two_chunks_one_lies_where_the_other_did_and_of_more_two_are_there() -> None:
    for chunks, sets, total in ((1, 1, 140), (2, 1, 140), (3, 2, 280), (8, 2, 280)):
        units = [block(numel) for _ in range(chunks) for numel in (40, 100)]
        chunk_of = [chunk for chunk in range(chunks) for _ in range(2)]
        plan = plan_chunks(units, [False] * len(units), chunk_of, GatherBudgets())
        assert (plan.sets, plan.ahead, plan.numel) == (sets, 0, total)
        for first in range(chunks):
            for second in range(first + 1, min(first + sets, chunks)):
                slots = [{*plan.slots.slot_of[2 * chunk : 2 * chunk + 2]} for chunk in (first, second)]
                assert not slots[0] & slots[1], "a chunk and the one gathered ahead of it lie apart"


def test_a_chunk_is_not_gathered_ahead_where_nothing_is_or_where_fewer_may_be_live() -> None:
    units = [block(100) for _ in range(4)]
    for budgets in (GatherBudgets(ahead=0), GatherBudgets(live=199)):
        plan = plan_chunks(units, [False] * 4, [0, 1, 2, 3], budgets)
        assert (plan.sets, plan.numel) == (1, 100)
    assert plan_chunks(units, [False] * 4, [0, 1, 2, 3], GatherBudgets(live=200)).sets == 2


def test_what_stays_what_several_chunks_use_and_the_rest_have_slots_of_their_own() -> None:
    units = [block(10), block(100), block(100), block(30), rest(7)]
    plan = plan_chunks(units, [True, False, False, False, False], [0, 0, 1, None, 0], GatherBudgets(stay=10))
    own = [plan.slots.slot_of[cell] for cell in (0, 3, 4)]
    assert plan.slots.slot_of[1] == plan.slots.slot_of[2]
    assert len({*own, plan.slots.slot_of[1]}) == 4
    assert (plan.numel, plan.slot_count) == (10 + 100 + 30 + 7, 1)


def test_the_largest_buffers_of_all_chunks_share_a_slot() -> None:
    assert slots_of_chunks([5, 90, 80, 6, 7], [0, 0, 1, 1, None], 1) == (1, 0, 0, 1, 6)
