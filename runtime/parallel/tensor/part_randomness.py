"""Random numbers of dropout in a block that is cut over ranks: alike where ranks hold the whole, different in parts.

[Note: random numbers of parts]
Outside of parts all ranks of the tensor axis draw the same: their generators stand alike from the start, and draw as
often. Between columns and a row each rank has other heads, whose dropout must not be the same. There the generators
start from a number that is drawn from the common one and mixed with the rank, and behind the row they go on where the
common ones stood. Nothing has to be saved: a recomputation that begins where the block began draws the same again.

Ranks begin to draw their own behind the last column of a module: until then its input, which is whole, may be dropped
out again for the next column. So what is drawn in parts before that (behind `gate`, before `up` is called) is alike on
all ranks, and all of it is where a forward leaves a column out. Where a module has several rows, its columns between
two of them, in the order in which they are defined, have a last one of their own.

A part of a block may be computed again alone, without the column before it or the row behind it. Which numbers are
drawn is told by the seed of the generators, which whoever computes again puts back with their state: a row finds by it
where the common ones stood, and the column that was last in the forward is the last again. Where no row comes and
nobody restores the generators (`preserve_rng_state=False`), the common ones go on when backward ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...compat import in_backward, when_backward_ends
from ...generators import generators_of
from .fronts import uncompiled, with_front

#: Odd, so that ranks get unlike numbers.
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1
_BLOCK = "_dsrun_part_randomness"
#: Parts that a row can still find the common numbers of: more than are between forward and backward. 5 KB each.
_KEPT = 2048


class PartRandomness:
    """The random numbers of the parts of a model's blocks, see [Note: random numbers of parts].

    Attributes:
        running: number of blocks whose forward runs; where it is 0, a part of a block is computed again.
        left: number of times that parts were left.

    Args:
        rank: rank on the tensor axis.
        device: device that the blocks compute on.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.running = 0
        self.left = 0
        self._rank = rank
        self._device = device
        #: States of the common numbers, by the seed of this rank's own.
        self._common: dict[int, list[Tensor]] = {}

    @uncompiled
    def enter(self) -> None:
        """From here on each rank draws its own; does nothing where that is so already."""
        generators = generators_of(self._device)
        if generators[0].initial_seed() in self._common:
            return
        number = int(torch.randint(_MASK, ()).item())  # of the CPU's generator: nothing waits for a GPU
        seed = (number + self._rank * _STEP) & _MASK
        self._common[seed] = [generator.get_state() for generator in generators]
        if len(self._common) > _KEPT:
            del self._common[next(iter(self._common))]
        for generator in generators:
            generator.manual_seed(seed)
        if not self.running and in_backward():
            when_backward_ends(self.leave)

    @uncompiled
    def leave(self) -> None:
        """From here on all ranks draw alike; does nothing where that is so already."""
        self.left += 1
        generators = generators_of(self._device)
        common = self._common.get(generators[0].initial_seed())
        if common is not None:
            for generator, state in zip(generators, common, strict=True):
                generator.set_state(state)

    def __deepcopy__(self, memo: object) -> PartRandomness:
        """Returns those of a copy of the model."""
        return PartRandomness(self._rank, self._device)


class Entrance:
    """Columns of one module, behind the last of which ranks draw their own; see [Note: random numbers of parts].

    Args:
        randomness: random numbers of the parts.
        columns: number of columns.
    """

    def __init__(self, randomness: PartRandomness, columns: int) -> None:
        self._randomness = randomness
        self._columns = columns
        self._called: set[int] = set()
        self._left = 0
        self._last: int | None = None

    def pass_column(self, number: int) -> None:
        """Notes that a column has been called, and enters the parts behind the last one.

        Args:
            number: position of the column among them.
        """
        randomness = self._randomness
        if randomness.running or self._last is None:
            if self._left != randomness.left:
                self._called.clear()
                self._left = randomness.left
            self._called.add(number)
            if len(self._called) < self._columns:
                return
            self._last = number
        elif number != self._last:
            return
        randomness.enter()


class _InCommon:
    """Stands before the class of a block: behind it all ranks draw alike, also where its forward has failed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        randomness: PartRandomness = getattr(self, _BLOCK)
        randomness.running += 1
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        finally:
            randomness.running -= 1
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
