"""A few fixed buffers that units take turns in.

[Note: slots]
Unit i always lies in slot i mod k, in forward and backward alike, so a parameter keeps its address for life: what
autograd saved stays valid once the unit is gathered again, nothing is allocated in the loop, and neither
`record_stream` nor the caching allocator is involved. A unit without a module (the rest unit) has a slot of its own,
and so have parameters that stay gathered from step to step. Frozen parameters of a unit's module lie behind its
trained ones. How many slots there are, `dsrun.gathering` decides.
Reuse is ordered by the stream: a collective into a slot is enqueued after the work that last read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from dsrun.gathering import (
    GatherBudgets,
    GatherPlan,
    SlotPlan,
    UnitElements,
    choose_staying,
    plan_gathering,
    plan_slots,
)

from ..memory.arena import Arena, room_for
from .unit import ParamUnit


def allocate_slots(
    units: Sequence[ParamUnit], *, count: int, reserve: Callable[[int], Arena]
) -> list[tuple[int, Tensor]]:
    """Allocates slots for buffers of the units' own parameters, see [Note: slots].

    Args:
        units: all units that have such a buffer, in order.
        count: slots that the units with modules share.
        reserve: makes an arena of so many elements, zeroed, in which all slots lie.

    Returns:
        for each unit its slot's number and a view [padded_numel] that starts where the slot starts.
    """
    sizes = [unit.layout.padded_numel for unit in units]
    plan = plan_slots(sizes, [unit.module is not None for unit in units], count=count)
    return list(zip(plan.slot_of, views_of_slots(plan, sizes, reserve=reserve), strict=True))


def views_of_slots(plan: SlotPlan, numels: Sequence[int], *, reserve: Callable[[int], Arena]) -> list[Tensor]:
    """Allocates the slots of a plan and returns, for each that has a place in it, a view from its slot's start.

    Args:
        plan: which slot each has, and how large slots are.
        numels: elements of each.
        reserve: makes an arena of so many elements, zeroed, in which all slots lie.
    """
    arena = reserve(room_for(list(plan.numel.values())))
    memory = {slot: arena.take(numel) for slot, numel in plan.numel.items()}
    return [memory[slot].narrow(0, 0, numel) for slot, numel in zip(plan.slot_of, numels, strict=True)]


def elements_of(unit: ParamUnit) -> UnitElements:
    """Returns what `dsrun.gathering` asks of a unit."""
    own = unit.layout
    if not unit.trains:
        return UnitElements(0, 0, own.numel, own.padded_numel, unit.module is not None)
    frozen = None if unit.frozen is None else unit.frozen.layout
    if frozen is None:
        return UnitElements(own.numel, own.padded_numel, has_module=unit.module is not None)
    return UnitElements(own.numel, own.padded_numel, frozen.numel, frozen.padded_numel, unit.module is not None)


def turns_of(units: Sequence[ParamUnit], budgets: GatherBudgets) -> GatherPlan:
    """Returns which of the units' parameters stay gathered, and how the others take turns.

    Args:
        units: in order of registration, each with its `frozen`, which does not stay.
        budgets: what the config allows.
    """
    elements = [elements_of(unit) for unit in units]
    return plan_gathering(elements, [stays.trained for stays in choose_staying(elements, budgets)], budgets)
