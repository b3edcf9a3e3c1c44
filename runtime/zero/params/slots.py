"""A few fixed buffers that units take turns in.

[Note: slots]
Unit i always lies in slot i mod k, in forward and backward alike, so a parameter keeps its address for life: what
autograd saved stays valid once the unit is gathered again, nothing is allocated in the loop, and neither
`record_stream` nor the caching allocator is involved. A unit without a module (the rest unit) has a slot of its own,
and so have parameters that stay gathered from step to step. Frozen parameters of a unit's module lie behind its
trained ones. How many slots there are, `dsrun.choices.gather_plan` decides.
Reuse is ordered by the stream: a collective into a slot is enqueued after the work that last read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsrun.choices.gather_plan import (
    GatherBudgets,
    GatherPlan,
    SlotPlan,
    UnitElements,
    choose_staying,
    plan_chunks,
    plan_gathering,
    plan_slots,
)

from ...memory.arena import Arena, room_for
from ..units.unit import ParamUnit

#: Makes an arena of so many elements of a dtype, zeroed, in which all slots of that dtype lie.
Reserve = Callable[[int, torch.dtype], Arena]


def allocate_slots(units: Sequence[ParamUnit], *, count: int, reserve: Reserve) -> list[tuple[int, Tensor]]:
    """Allocates slots for buffers of the units' own parameters, see [Note: slots].

    Args:
        units: all units that have such a buffer, in order; those with modules are of one dtype.
        count: slots that the units with modules share.
        reserve: function that makes a zeroed arena for all slots of one dtype; see `Reserve`.

    Returns:
        for each unit its slot's number and a view [padded_numel] that starts where the slot starts.
    """
    sizes = [unit.layout.padded_numel for unit in units]
    plan = plan_slots(sizes, [unit.module is not None for unit in units], count=count)
    views = views_of_slots(plan, sizes, [unit.dtype for unit in units], reserve=reserve)
    return list(zip(plan.slot_of, views, strict=True))


def views_of_slots(
    plan: SlotPlan, numels: Sequence[int], dtypes: Sequence[torch.dtype], *, reserve: Reserve
) -> list[Tensor]:
    """Allocates the slots of a plan and returns, for each that has a place in it, a view from its slot's start.

    Args:
        plan: plan with the slot of each buffer and the size of each slot.
        numels: elements of each.
        dtypes: dtype of each buffer; buffers that share a slot have the same one.
        reserve: function that makes a zeroed arena for all slots of one dtype; see `Reserve`.
    """
    dtype_of = dict(zip(plan.slot_of, dtypes, strict=True))
    memory: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(dtypes):
        of_dtype = {slot: numel for slot, numel in plan.numel.items() if dtype_of[slot] == dtype}
        arena = reserve(room_for(list(of_dtype.values())), dtype)
        memory |= {slot: arena.take(numel) for slot, numel in of_dtype.items()}
    return [memory[slot].narrow(0, 0, numel) for slot, numel in zip(plan.slot_of, numels, strict=True)]


def in_dtype(dtype: torch.dtype) -> str:
    """Returns what follows the name of an arena that has one of the same kind in another dtype beside it."""
    return f" in {str(dtype).removeprefix('torch.')}"


def elements_of(unit: ParamUnit) -> UnitElements:
    """Returns what `dsrun.choices.gather_plan` asks of a unit."""
    own = unit.layout
    if not unit.trains:
        return UnitElements(0, 0, own.numel, own.padded_numel, unit.module is not None)
    frozen = None if unit.frozen is None else unit.frozen.layout
    if frozen is None:
        return UnitElements(own.numel, own.padded_numel, has_module=unit.module is not None)
    return UnitElements(own.numel, own.padded_numel, frozen.numel, frozen.padded_numel, unit.module is not None)


def turns_of(
    units: Sequence[ParamUnit], budgets: GatherBudgets, *, chunk_of: Mapping[int, int] | None = None
) -> GatherPlan:
    """Returns which of the units' parameters stay gathered, and how the others take turns.

    Args:
        units: units in order of registration, each with its `frozen`, which does not stay gathered.
        budgets: limits that the config sets for gathered parameters.
        chunk_of: position of the chunk of each unit that one chunk alone uses, by the unit's index, where chunks take
            turns; None: units do.
    """
    elements = [elements_of(unit) for unit in units]
    stays = [stays.trained for stays in choose_staying(elements, budgets)]
    if chunk_of is None:
        return plan_gathering(elements, stays, budgets)
    return plan_chunks(elements, stays, [chunk_of.get(unit.index) for unit in units], budgets)
