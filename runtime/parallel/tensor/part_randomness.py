"""Random numbers of dropout in a block that is cut over ranks: alike where ranks hold the whole, different in parts.

[Note: random numbers of parts]
Outside of parts all ranks of the tensor axis draw the same: their generators stand alike from the start, and draw as
often. Between a column and a row each rank has other heads, whose dropout must not be the same. There the generators
start from a number that is drawn from the common one and mixed with the rank, and behind the row they go on where the
common ones stood. Nothing has to be saved: a recomputation that begins where the block began draws the same again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...generators import generators_of
from .fronts import with_front

#: Odd, so that ranks get unlike numbers.
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1
_BLOCK = "_dsrun_part_randomness"


class PartRandomness:
    """The random numbers of the parts of one block, see [Note: random numbers of parts].

    Args:
        rank: rank on the tensor axis.
        device: device that the block computes on.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._common: list[Tensor] | None = None

    def enter(self) -> None:
        """From here on each rank draws its own; does nothing where that is so already."""
        if self._common is not None:
            return
        number = int(torch.randint(_MASK, ()).item())  # of the CPU's generator: nothing waits for a GPU
        generators = generators_of(self._device)
        self._common = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed((number + self._rank * _STEP) & _MASK)

    def leave(self, *_: Any) -> None:
        """From here on all ranks draw alike; does nothing where that is so already."""
        if self._common is not None:
            for generator, state in zip(generators_of(self._device), self._common, strict=True):
                generator.set_state(state)
            self._common = None


class _InCommon:
    """Stands before the class of a block: behind it all ranks draw alike, also where its forward has failed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        randomness: PartRandomness = getattr(self, _BLOCK)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        finally:
            randomness.leave()


def leave_behind(block: nn.Module, randomness: PartRandomness) -> None:
    """Has ranks draw alike behind a block, however it ends."""
    setattr(block, _BLOCK, randomness)
    block.__class__ = with_front(_InCommon, type(block))


def draws(block: nn.Module) -> bool:
    """Whether a block has dropout: a module with it, or a number by such a name that is not 0."""
    for part in block.modules():
        for name, value in vars(part).items():
            is_chance = isinstance(value, float) and value > 0 and not name.startswith("_")
            if is_chance and ("drop" in name or (name == "p" and "Dropout" in type(part).__name__)):
                return True
    return False
