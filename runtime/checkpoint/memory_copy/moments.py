"""Moments that copies in memory are of: which of them all ranks have, and what the next one is called.

Numbers, and an all-reduce where ranks tell each other theirs. Knows neither files nor how a copy comes to another rank.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...mesh.collectives import Collectives
from .files import GENERATIONS, Label

_NONE = -1
_IDENTITY_BITS = 31


@dataclass(frozen=True, slots=True)
class CopyInventory:
    """Which copies there are, as all ranks know it.

    Attributes:
        own: key of each rank's own copy, by rank and then by generation; -1 for none.
        kept: key of the copy that each rank's neighbour keeps for it, by rank and then by generation; -1 for none.
        disk_step: step of what there is on the disk, as rank 0 sees it; -1 for nothing.
    """

    own: Sequence[Sequence[int]]
    kept: Sequence[Sequence[int]]
    disk_step: int


def key_of(label: Label) -> int:
    """Returns the number of a copy's moment: later steps have larger ones, and no two moments the same."""
    return (label.step << _IDENTITY_BITS) | label.identity


def step_of(key: int) -> int:
    """Returns the optimizer steps that a moment is of."""
    return key >> _IDENTITY_BITS


def agree_on_next(state: int, collectives: Collectives, *, device: torch.device) -> tuple[int, int]:
    """Returns the largest state of any rank, and an identity for the next moment that rank 0 has drawn; one all-reduce.

    Args:
        state: state of this rank's last copy, as a number; the largest one of all ranks decides.
        collectives: all ranks.
        device: device of the tensors that the collectives use.
    """
    drawn = secrets.randbits(_IDENTITY_BITS) if collectives.rank == 0 else 0
    told = torch.tensor([state, drawn], dtype=torch.int64, device=device)
    collectives.all_reduce(told, op="max", label="copies in memory").wait()
    with collectives.reading("copies in memory"):
        worst, identity = told.tolist()
    return int(worst), int(identity)


def tell_held(
    labels: Mapping[tuple[int, int], Label | None], disk_step: int, collectives: Collectives, *, device: torch.device
) -> CopyInventory:
    """Tells all ranks which copies this one holds; one all-reduce of 4 numbers a rank.

    Args:
        labels: labels of the copies that this rank has or keeps, by the rank of the state and by generation; None for
            none.
        disk_step: step of the checkpoint on the disk, -1 for none; only rank 0's value counts; see `CopyInventory`.
        collectives: all ranks.
        device: device of the tensors that the collectives use.

    Returns:
        what all have told.
    """
    rank, size = collectives.rank, collectives.size
    told = torch.full((2, size, GENERATIONS), _NONE, dtype=torch.int64)
    for (other, generation), label in labels.items():
        if label is not None:
            told[0 if other == rank else 1, other, generation] = key_of(label)
    word = torch.tensor([disk_step if rank == 0 else _NONE], dtype=torch.int64)
    everyone = torch.cat([told.view(-1), word]).to(device)
    collectives.all_reduce(everyone, op="max", label="copies in memory").wait()
    with collectives.reading("copies in memory"):
        numbers = everyone.cpu()
    own, kept = numbers[:-1].view(2, size, GENERATIONS).tolist()
    return CopyInventory(own, kept, int(numbers[-1]))


def newest_common(own: Sequence[Sequence[int]], kept: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Returns (key, generation) of the newest moment of which every rank has a copy; None where there is none.

    Args:
        own: key of each rank's own copy, by rank and then by generation; -1 for none.
        kept: key of the copy that each rank's neighbour keeps for it, by rank and then by generation; -1 for none.
    """
    common: list[tuple[int, int]] = []
    for generation in range(GENERATIONS):
        there = [{mine[generation], other[generation]} - {_NONE} for mine, other in zip(own, kept, strict=True)]
        common += [(key, generation) for key in set[int].intersection(*there)]
    return max(common, default=None)


def why_none(held: CopyInventory) -> str:
    """Returns why no moment is whole, and from where the run goes on then, for a person."""
    keys = [key for table in (held.own, held.kept) for row in table for key in row if key != _NONE]
    disk = "from the start" if held.disk_step == _NONE else f"from the checkpoint of step {held.disk_step}"
    if not keys:
        return f"no copy in memory is left: going on {disk}"
    newest = max(keys)
    gone = [
        str(rank)
        for rank, rows in enumerate(zip(held.own, held.kept, strict=True))
        if not any(newest in row for row in rows)
    ]
    return (
        f"the copy in memory of step {step_of(newest)} is not whole (none of rank {', '.join(gone)}): going on {disk}"
    )
