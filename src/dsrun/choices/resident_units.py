"""Which units keep their masters and optimizer states on the device, where only a share leaves: for runtime and plans.

Pure arithmetic on elements. What is measured, and what follows from it, is the runtime's business.

[Note: what stays] Whole units stay, the first ones of the forward first: they are stepped at once, so the next forward
begins with them while the host steps those that it needs later. A unit that is too large for what is left is passed
over, and a later one may take its place.
"""

from __future__ import annotations

from collections.abc import Sequence


def units_that_stay(numels: Sequence[int], has_module: Sequence[bool], room: int) -> tuple[bool, ...]:
    """Returns for each unit whether it stays, see [Note: what stays].

    Args:
        numels: elements that a rank updates of each unit, in order of registration.
        has_module: flags, one for each unit, that say whether it belongs to one module; a unit that does not is needed
            from the beginning.
        room: elements that may stay.
    """
    stays = [False] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: has_module[index]):
        if numels[index] <= room:
            room -= numels[index]
            stays[index] = True
    return tuple(stays)


def room_at_ratio(numels: Sequence[int], ratio: float) -> int:
    """Returns how many elements may stay where at least the share `ratio` of them leaves."""
    total = sum(numels)
    return total - min(total, round(total * ratio))
