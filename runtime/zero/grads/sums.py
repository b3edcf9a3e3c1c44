"""Where gradients go once they are reduced: what a micro step adds to, what the norm and the update are taken of.

One place may have them all, or each unit one of two.

How they are reduced, and when, is decided in `reducer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ...compat import foreach_zero
from ...memory.arena import joined
from ...mesh.collectives import Pending
from ...mesh.sums import add_scaled, set_scaled
from ...optim.norm import block_norms
from ..units.unit import ParamUnit

#: Above so many elements the calls of a norm a unit take nothing beside it.
_JOINED_NUMEL = 1 << 24


class GradSums(Protocol):
    """The sums over micro steps of what this rank owns of each unit's gradient; units by their index."""

    def take(self, index: int, reduced_N: Tensor, factor: float, *, first: bool) -> Pending | None:
        """Adds `factor * reduced_N` to a unit's sum.

        Args:
            index: index of the unit.
            reduced_N: its owned range, in the dtype that has travelled; may be overwritten.
            factor: 1 / ranks, for sums over ranks become means.
            first: the sum begins with it.

        Returns:
            what still reads `reduced_N`: to be waited for before anybody writes there. None: nothing does, for whoever
            uses the current stream next.
        """
        ...

    def clear(self) -> None:
        """Makes all sums zero: no micro step has begun any."""
        ...

    def norms(self) -> list[Tensor]:
        """Returns `block_norms` of what this rank counts of all sums, in any order, on the device: one tensor or more.

        See `ParamUnit.counted`.
        """
        ...

    def read(self, index: int) -> Tensor:
        """Returns a unit's sum, on the device or in host memory; not to be written to."""
        ...

    def edit(self, index: int) -> Tensor:
        """Returns a unit's sum on the device; what is written to it counts."""
        ...


class ResidentSums:
    """Sums in a buffer a unit, beside the masters.

    Args:
        units: units with their sums here; their `grad_sum`s are the buffers.
    """

    def __init__(self, units: Sequence[ParamUnit]) -> None:
        self._by_index = {unit.index: unit for unit in units}

    def take(self, index: int, reduced_N: Tensor, factor: float, *, first: bool) -> Pending | None:
        """See `GradSums`: computed in fp32, where sums are fp32."""
        (set_scaled if first else add_scaled)(self._by_index[index].grad_sum, reduced_N, factor)

    def clear(self) -> None:
        """See `GradSums`."""
        foreach_zero([unit.grad_sum for unit in self._by_index.values()])

    def norms(self) -> list[Tensor]:
        """See `GradSums`: of small sums that follow each other in memory in one call."""
        sums = [
            unit.grad_sum if unit.counted is None else unit.grad_sum[slice(*unit.counted)]
            for unit in self._by_index.values()
        ]
        whole = joined(sums) if sum(one.numel() for one in sums) <= _JOINED_NUMEL else None
        return [block_norms(one) for one in sums] if whole is None else [block_norms(whole)]

    def read(self, index: int) -> Tensor:
        """See `GradSums`."""
        return self._by_index[index].grad_sum

    def edit(self, index: int) -> Tensor:
        """See `GradSums`."""
        return self._by_index[index].grad_sum


class SplitSums:
    """Sums of which some lie beside the masters, and the others elsewhere.

    Args:
        units: all units.
        elsewhere: sums of the units that do not have theirs beside the masters.
        leaving: numbers of these units, each to the number by which `elsewhere` knows it.
    """

    def __init__(self, units: Sequence[ParamUnit], elsewhere: GradSums, leaving: Mapping[int, int]) -> None:
        self._here = ResidentSums([unit for unit in units if unit.index not in leaving])
        self._elsewhere = elsewhere
        self._leaving = leaving

    def take(self, index: int, reduced_N: Tensor, factor: float, *, first: bool) -> Pending | None:
        """See `GradSums`."""
        sums, number = self._of(index)
        return sums.take(number, reduced_N, factor, first=first)

    def clear(self) -> None:
        """See `GradSums`."""
        self._here.clear()
        self._elsewhere.clear()

    def norms(self) -> list[Tensor]:
        """See `GradSums`."""
        return [*self._here.norms(), *self._elsewhere.norms()]

    def read(self, index: int) -> Tensor:
        """See `GradSums`."""
        sums, number = self._of(index)
        return sums.read(number)

    def edit(self, index: int) -> Tensor:
        """See `GradSums`."""
        sums, number = self._of(index)
        return sums.edit(number)

    def _of(self, index: int) -> tuple[GradSums, int]:
        number = self._leaving.get(index)
        return (self._here, index) if number is None else (self._elsewhere, number)
