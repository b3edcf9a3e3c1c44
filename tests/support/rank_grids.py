"""Grids of ranks over which weights are cut and repeat, and what each rank has of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import TensorBoxes, uncut
from dsrun.runtime.protocols import Holders, StateEntry
from support.entries import column, entry_of, packed, part_of, row

#: An axis over which weights are cut.
TENSOR = "tensor"
Cut = Callable[[Sequence[int], int, int], TensorBoxes]
Weights = dict[str, tuple[tuple[int, ...], Cut | None]]
#: Whole shapes, and how each is cut over the axis; sizes that no number of ranks divides among them.
WEIGHTS: Weights = {
    "qkv.weight": ((36, 10), packed),
    "qkv.bias": ((36,), packed),
    "out.weight": ((10, 13), row),
    "up.weight": ((13, 10), column),
    "down.conv": ((5, 13, 3), row),
    "tiny.weight": ((1, 7), column),
    "norm.weight": ((10,), None),
    "gain": ((), None),
    "none": ((0, 3), column),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """Data-parallel ranks, and ranks that a weight is cut over; neighbours are of the latter.

    Attributes:
        data: ranks that hold the same weights, or flat slices of them.
        tensor: ranks that weights are cut over.
        slices: whether ranks of the data axis own flat slices of what is cut.
        whole_slices: whether they own flat slices of what is not.
    """

    data: int
    tensor: int
    slices: bool
    whole_slices: bool

    @property
    def size(self) -> int:
        return self.data * self.tensor

    def piece(self, name: str, values: Tensor, cut: Cut | None, rank: int, *, role: str) -> StateEntry:
        """What a rank has of a tensor."""
        data, tensor = divmod(rank, self.tensor)
        part = uncut(values.shape) if cut is None else cut(values.shape, tensor, self.tensor)
        own = part_of(values, part)
        start, stop = 0, own.numel()
        repeats: dict[str, tuple[int, int]] = {}
        if self.slices if cut is not None else self.whole_slices:
            start, stop = own.numel() * data // self.data, own.numel() * (data + 1) // self.data
        else:
            repeats["data"] = (data, self.data)
        if cut is None:
            repeats[TENSOR] = (tensor, self.tensor)
        number = 0
        for at, size in repeats.values():
            number = number * size + at
        holders = Holders(tuple(repeats), number, prod(size for _, size in repeats.values()))
        return entry_of(name, own[start:stop].clone(), whole=part, start=start, role=role, holders=holders)


def values_of(weights: Weights) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in weights.items()}


def entries_of(grid: Grid, rank: int, weights: Weights) -> list[StateEntry]:
    return [
        grid.piece(name, (values + number).to(dtype), weights[name][1], rank, role=role)
        for number, (role, dtype) in enumerate((("param", torch.float32), ("exp_avg", torch.bfloat16)))
        for name, values in values_of(weights).items()
    ]
