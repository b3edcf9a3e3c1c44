"""Where a model's parameters and masters live, as one value. What lies there is cut in `units.py` and `buffers.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...memory.host_pool import HostPool
from ..units.tier import ShardTier
from ..units.unit import ParamUnit


class MasterPlaces(Protocol):
    """Places for masters that are not always in memory. At stages 1 to 3: a rank has its slices.

    Units have numbers: the position among those whose masters come here.
    """

    def reserve(self, labels: Sequence[str], numels: Sequence[int], master: torch.dtype, state: torch.dtype) -> None:
        """Makes room for the masters of units, and for states in their own dtype beside them."""
        ...

    def admit(self, index: int, values_N: Tensor) -> Tensor:
        """Takes a unit's first masters, in any dtype and on any device; returns them where they are from now on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where parameters and masters live; by default on the device.

    Attributes:
        tier: Holder of the slices of parameters at stage 3; None: the device.
        masters_host: Memory for masters, where the optimizer steps on the host; None: they lie beside the parameters.
            Slices in a tier are the masters themselves where both have one dtype.
        masters_away: Places for masters that are not always in memory; None: they are in memory.
        stays: Answer for units that are laid out, whether the masters of each stay on the device although there is a
            place for masters elsewhere; the same on every rank. None: all of them leave.
        moves: Whether masters in host memory may come to the device later, and then give that memory back.
    """

    tier: ShardTier | None = None
    masters_host: HostPool | None = None
    masters_away: MasterPlaces | None = None
    stays: Callable[[Sequence[ParamUnit]], Sequence[bool]] | None = None
    moves: bool = False

    def staying(self, units: Sequence[ParamUnit]) -> Sequence[bool]:
        """Returns for each unit whether its masters stay on the device."""
        if self.masters_host is None and self.masters_away is None:
            return [True] * len(units)
        return [False] * len(units) if self.stays is None else self.stays(units)


#: Everything lies on the device.
ON_DEVICE = Placement()
