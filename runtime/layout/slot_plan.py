"""Which unit lies in which slot, and how large slots are. Pure arithmetic; see [Note: slots] in zero/slots.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots for the units of a model.

    Attributes:
        slot_of: slot number of each unit, in order of units.
        numel: elements of each slot by its number: those of its largest unit.
    """

    slot_of: tuple[int, ...]
    numel: dict[int, int]


def plan_slots(padded_numel: Sequence[int], shares: Sequence[bool], *, count: int) -> SlotPlan:
    """Puts unit i into slot i mod `count`, or into a slot of its own.

    Args:
        padded_numel: elements of each unit's flat buffer.
        shares: False for a unit that needs a slot of its own.
        count: shared slots.
    """
    slot_of = tuple(index % count if shared else count + index for index, shared in enumerate(shares))
    numel: dict[int, int] = {}
    for slot, size in zip(slot_of, padded_numel, strict=True):
        numel[slot] = max(numel.get(slot, 0), size)
    return SlotPlan(slot_of, numel)
