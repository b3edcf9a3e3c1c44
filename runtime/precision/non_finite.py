"""Which parameter has the gradient that is inf or nan: looked for only when the norm has told that there is one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..layout.unit_layout import UnitLayout
from ..mesh.collectives import Collectives


def first_non_finite(
    ranges: Iterable[tuple[UnitLayout, int, Tensor]], collectives: Collectives, *, spread: bool, device: torch.device
) -> str | None:
    """Returns the first parameter, in the units' order, with a gradient that is not finite; the same on every rank.

    Reads from the device once a range, and again in the range that has it; one all-reduce of one number.

    Args:
        ranges: ranges of all units, each as layout, first element of the range, and its gradients, flat.
        collectives: all ranks of the job; every rank must call.
        spread: the ranges are spread over them; False: every rank holds all, and nothing is exchanged.
        device: device of the gradients.

    Returns:
        its name; None where every gradient is finite and only the sum of their squares is not.
    """
    names: list[str] = []
    found: int | None = None
    for layout, start, grads_N in ranges:
        if found is None and not _is_finite(grads_N):
            found = _first_of(layout, start, grads_N, before=len(names))
        names += [extent.name for extent in layout.extents]
    if spread:
        # The largest of negative numbers is the first of places.
        place = torch.full((1,), float(-len(names) if found is None else -found), dtype=torch.float64, device=device)
        collectives.all_reduce(place, op="max", label="non-finite gradient").wait()
        with collectives.reading("non-finite gradient"):
            found = round(-float(place))
    return None if found is None or found == len(names) else names[found]


def _first_of(layout: UnitLayout, start: int, grads_N: Tensor, *, before: int) -> int | None:
    """Returns the place of the first parameter in the range that is not finite, counted over all units."""
    places = {extent.name: before + number for number, extent in enumerate(layout.extents)}
    for piece in layout.pieces(start, start + grads_N.numel()):
        if not _is_finite(grads_N.narrow(0, piece.shard_offset, piece.stop - piece.start)):
            return places[piece.extent.name]
    return None


def _is_finite(values_N: Tensor) -> bool:
    """Whether no element is inf or nan; needs no memory of the size of the values."""
    if values_N.numel() == 0:
        return True
    smallest, largest = torch.aminmax(values_N)
    return bool(torch.isfinite(torch.stack([smallest, largest])).all())
