"""Where slices of parameters lie when that is not the device: what stage 3 asks of such a place.

Implemented in `offload`; who has no tier has its slices on the device, and an all-gather brings them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...mesh.collectives import Collectives, Pending

if TYPE_CHECKING:
    from .unit import ParamUnit


class ShardTier(Protocol):
    """Holds this rank's slices of units, by the units' index."""

    def reserve(self, name: str, numels: Sequence[int], dtype: torch.dtype, *, labels: Sequence[str]) -> None:
        """Makes room for slices of these sizes, which `admit` fills; every rank must call.

        Args:
            name: name of the arena, the same as on the device.
            numels: elements of each slice.
            dtype: dtype of the slices' elements.
            labels: labels of the units that the slices belong to, for errors.
        """
        ...

    def admit(self, index: int, values_S: Tensor) -> Tensor:
        """Takes the first values of a unit's slice, in any dtype and on any device.

        Returns:
            the slice where it lies, or an empty tensor where it can be read by `gather` alone.
        """
        ...

    def gather(self, index: int, flat_N: Tensor, replicas: Collectives, *, label: str) -> Pending:
        """Starts to fill `flat_N`, on the device, with the slices of all ranks; every rank must call.

        Runs after all that the current stream has been given. What it returns must be waited for in the order of the
        gathers on every rank, for the collective may begin only then.

        Args:
            index: index of the unit.
            flat_N: flat, size * S elements; overwritten.
            replicas: ranks that have the slices.
            label: name of the data that is gathered, shown to observers of the wait.
        """
        ...

    def write(self, index: int, values_S: Tensor) -> None:
        """Gives a unit's slice new values, in any dtype; later gathers bring these."""
        ...

    def settle(self) -> None:
        """Returns when nothing reads or writes a slice: for who does so where it lies."""
        ...


def gather(unit: ParamUnit, flat_N: Tensor) -> Pending:
    """Starts to fill `flat_N` with the slices of all ranks of a unit, wherever they lie.

    Args:
        unit: the unit.
        flat_N: compute dtype, [padded_numel], on the device; overwritten.
    """
    if unit.tier is None:
        return unit.replicas.all_gather(flat_N, unit.shard, label=unit.label)
    return unit.tier.gather(unit.index, flat_N, unit.replicas, label=unit.label)
