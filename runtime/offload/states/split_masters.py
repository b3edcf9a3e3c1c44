"""Masters in two halves where parameters lie in host memory: the upper half is the parameters, the lower lies here.

Implements zero's `MasterPlaces` and `MasterHalves`; what a half is: [Note: split master] in split_master.py. 2 bytes an
element in place of 4. Who wants a master whole gets a copy, and puts it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...memory.arena import Arena, room_for
from ...memory.arenas import Arenas
from ...memory.host_pool import HostPool
from .scratch import Scratch
from .split_master import SplitMaster, join_master


class UnitHalves:
    """The masters that a rank has of one unit.

    Args:
        low_N: int16, [N].
        values_N: the first masters, fp32.
    """

    def __init__(self, low_N: Tensor, values_N: Tensor) -> None:
        self._split = SplitMaster(torch.empty_like(low_N, dtype=torch.bfloat16), low_N)
        self.part(values_N.float())
        # The parameters are the same values rounded alike: they are the upper half from `take_upper` on.
        self._split.high_N = torch.empty(0, dtype=torch.bfloat16)

    def take_upper(self, shard_N: Tensor) -> None:
        """Says where the parameters lie: bf16, [N], of the same masters."""
        self._split.high_N = shard_N

    def joined(self) -> Tensor:
        """See `MasterHalves`."""
        return join_master(self._split)

    def part(self, values_N: Tensor) -> None:
        """See `MasterHalves`."""
        self._split.split(0, values_N.contiguous(), Scratch())
        self._split.settle()

    def buffers(self) -> list[Tensor]:
        """See `MasterHalves`."""
        return [self._split.low_N]

    def of(self, start: int, stop: int) -> SplitMaster:
        """Returns the masters of [start, stop) to be stepped, until `keep`."""
        ties = self._split.ties
        inside = ties[(ties >= start) & (ties < stop)] - start
        return SplitMaster(self._split.high_N[start:stop], self._split.low_N[start:stop], inside)

    def keep(self, start: int, part: SplitMaster) -> None:
        """Takes over what a step has made of the part that `of` returned."""
        ties, stop = self._split.ties, start + part.numel()
        if ties.numel() or part.ties.numel():
            outside = ties[(ties < start) | (ties >= stop)]
            self._split.ties = torch.cat([outside, part.ties + start]).sort().values


class SplitMasters:
    """Places for the lower halves of all units.

    Args:
        memory: arenas in which the lower halves are reserved.
        pool: pool that makes the host memory.
    """

    def __init__(self, memory: Arenas, pool: HostPool) -> None:
        self._memory = memory
        self._pool = pool
        self._arena: Arena | None = None
        self._halves: dict[int, UnitHalves] = {}

    def reserve(self, labels: Sequence[str], numels: Sequence[int], master: torch.dtype, state: torch.dtype) -> None:
        """See `MasterPlaces`."""
        assert master == torch.float32, "the config was checked"
        self._arena = self._memory.reserve(
            "low halves of masters",
            room_for(numels),
            lambda numel: self._pool.zeros(numel, dtype=torch.int16),
            tier="host",
        )

    def admit(self, index: int, values_N: Tensor) -> Tensor:
        """See `MasterPlaces`; what it returns has the shape of the masters alone, and no memory."""
        assert self._arena is not None, "room is reserved before masters come"
        self._halves[index] = UnitHalves(self._arena.take(values_N.numel()), values_N.cpu())
        return torch.zeros(1).expand(values_N.numel())

    def halves(self, index: int, shard_N: Tensor) -> UnitHalves:
        """Returns the masters of a unit, by its position among those that have come.

        Args:
            index: the position.
            shard_N: its parameters, which are the upper half from here on.
        """
        halves = self._halves[index]
        halves.take_upper(shard_N)
        return halves
