"""A few fixed buffers that units take turns in.

[Note: slots]
Unit i always lies in slot i mod k, in forward and backward alike, so a parameter keeps its address for life: what
autograd saved stays valid once the unit is gathered again, nothing is allocated in the loop, and neither
`record_stream` nor the caching allocator is involved. A unit without a module (the rest unit) has a slot of its own.
Reuse is ordered by the stream: a collective into a slot is enqueued after the work that last read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..layout.slot_plan import plan_slots
from .unit import ParamUnit


def allocate_slots(
    units: Sequence[ParamUnit], *, count: int, zeros: Callable[[int], Tensor]
) -> list[tuple[int, Tensor]]:
    """Allocates the slots and returns (slot number, view of its memory) for each unit, see [Note: slots].

    Args:
        units: all units of the model, in order.
        count: slots that the units with modules share.
        zeros: makes flat, zeroed memory of so many elements.

    Returns:
        for each unit its slot's number and a view [padded_numel] that starts where the slot starts.
    """
    plan = plan_slots([u.layout.padded_numel for u in units], [u.module is not None for u in units], count=count)
    memory = {slot: zeros(numel) for slot, numel in plan.numel.items()}
    return [
        (slot, memory[slot].narrow(0, 0, unit.layout.padded_numel))
        for unit, slot in zip(units, plan.slot_of, strict=True)
    ]
