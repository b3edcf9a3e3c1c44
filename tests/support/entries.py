"""Pieces of state as tests write them: a tensor's values, and which part of the whole tensor they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import Region, TensorBoxes, uncut
from dsrun.runtime.protocols import SOLE_HOLDER, Holders, StateEntry


def all_of(size: int, rank: int = 0) -> Holders:
    """Holders of what each of `size` data-parallel ranks has."""
    return Holders(("data",), rank, size)


def entry_of(
    name: str,
    values: Tensor,
    *,
    shape: Sequence[int] | None = None,
    start: int = 0,
    role: str = "param",
    whole: TensorBoxes | None = None,
    holders: Holders = SOLE_HOLDER,
) -> StateEntry:
    """Returns the piece of a tensor whose values these are.

    Args:
        name: name of the tensor.
        values: flat, or the whole tensor; loading writes into it.
        shape: shape of the whole tensor where that is not cut; None: that of `values`.
        start: first element of the rank's tensor that `values` has.
        role: role of the tensor.
        whole: boxes of the whole tensor that the rank's is made of; None: all of it.
        holders: ranks that hold the same piece.
    """
    found = whole or uncut(values.shape if shape is None else shape)
    return StateEntry(name, role, found, start, start + values.numel(), values.view(-1), holders)


def empty_like(entry: StateEntry) -> StateEntry:
    """Returns the same piece, with zeros to be loaded into."""
    zeros = torch.zeros_like(entry.tensor)
    return StateEntry(entry.name, entry.role, entry.whole, entry.start, entry.stop, zeros, entry.holders)


def column(shape: Sequence[int], part: int, parts: int) -> TensorBoxes:
    """A part of a weight that is cut on dim 0."""
    return packed(shape, part, parts, count=1)


def row(shape: Sequence[int], part: int, parts: int) -> TensorBoxes:
    """A part of a weight that is cut on dim 1."""
    low, high = shape[1] * part // parts, shape[1] * (part + 1) // parts
    rest = tuple(shape[2:])
    return TensorBoxes(tuple(shape), (Region((0, low, *(0 for _ in rest)), (shape[0], high - low, *rest)),))


def packed(shape: Sequence[int], part: int, parts: int, *, count: int = 3) -> TensorBoxes:
    """A part of several weights that stand one after the other on dim 0, each of them cut there."""
    each, rest = shape[0] // count, tuple(shape[1:])
    low, high = each * part // parts, each * (part + 1) // parts
    boxes = [Region((number * each + low, *(0 for _ in rest)), (high - low, *rest)) for number in range(count)]
    return TensorBoxes(tuple(shape), tuple(box for box in boxes if box.numel))


def part_of(values: Tensor, part: TensorBoxes) -> Tensor:
    """Returns the elements of a rank's tensor, flat, out of the whole one."""
    return torch.cat([values.new_empty(0), *(values[box.slices].reshape(-1) for box in part.boxes)])
