"""Which parameter has the gradient that is inf or nan: looked for only when the norm has told that there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..layout.unit_layout import UnitLayout
from ..mesh.collectives import Collectives

_LABEL = "non-finite gradient"
#: More than a stage has parameters.
_PLACES = 1 << 24
#: Of a name so much is told to the other stages.
_NAME_BYTES = 1024


def first_non_finite(
    ranges: Iterable[tuple[UnitLayout, int, Tensor]],
    collectives: Collectives,
    *,
    spread: bool,
    device: torch.device,
    stage: tuple[int, int] = (0, 1),
) -> str | None:
    """Returns the first parameter, in the units' order, with a gradient that is not finite; the same on every rank.

    Reads from the device once a range, and again in the range that has it; one all-reduce of one number. With pipeline
    stages also a broadcast of the name, which only its stage's ranks know.

    Args:
        ranges: ranges of all units, each as layout, first element of the range, and its gradients, flat.
        collectives: all ranks of the job; every rank must call.
        spread: the ranges are spread over them; False: every rank holds all, and nothing is exchanged.
        device: device of the gradients.
        stage: this rank's pipeline stage, and the number of stages; units of an earlier stage come first.

    Returns:
        its name; None where every gradient is finite and only the sum of their squares is not.
    """
    names: list[str] = []
    found: int | None = None
    for layout, start, grads_N in ranges:
        if found is None and not _is_finite(grads_N):
            found = _first_of(layout, start, grads_N, before=len(names))
        names += [extent.name for extent in layout.extents]
    own, stages = stage
    if stages > 1:
        return _of_first_stage(None if found is None else names[found], found, collectives, stage=own, device=device)
    if spread:
        # The largest of negative numbers is the first of places.
        place = torch.full((1,), float(-len(names) if found is None else -found), dtype=torch.float64, device=device)
        collectives.all_reduce(place, op="max", label=_LABEL).wait()
        with collectives.reading(_LABEL):
            found = round(-float(place))
    return None if found is None or found == len(names) else names[found]


def _of_first_stage(
    name: str | None, place: int | None, collectives: Collectives, *, stage: int, device: torch.device
) -> str | None:
    """Returns the name that the first of all stages' places has; every rank must call.

    Args:
        name: name of the first parameter that this rank has found.
        place: its place among the units of this rank's stage; None where it has found none.
        collectives: all ranks of the job.
        stage: this rank's pipeline stage.
        device: device of the collectives' tensors.
    """
    # The smallest of numbers that order by stage, then place, then rank; exact in fp64.
    mine = math.inf if place is None else float((stage * _PLACES + place) * collectives.size + collectives.rank)
    first = torch.full((1,), -mine, dtype=torch.float64, device=device)
    collectives.all_reduce(first, op="max", label=_LABEL).wait()
    with collectives.reading(_LABEL):
        found = -float(first)
    if math.isinf(found):
        return None
    row = torch.zeros(_NAME_BYTES, dtype=torch.uint8, device=device)
    if mine == found:
        text = (name or "").encode()[:_NAME_BYTES]
        row[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    collectives.broadcast(row, source=int(found) % collectives.size, label=_LABEL).wait()
    with collectives.reading(_LABEL):
        return bytes(row.tolist()).rstrip(b"\0").decode("utf-8", "replace")


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
