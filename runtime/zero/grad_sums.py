"""Where gradients go once they are reduced: what a micro step adds to, what the norm and the update are taken of.

How they are reduced, and when, is decided in `reducer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..compat import foreach_zero
from ..mesh.sums import add_scaled, set_scaled
from ..optim.norm import block_norms
from .unit import ParamUnit


class GradSums(Protocol):
    """The sums over micro steps of what this rank owns of each unit's gradient; units by their index."""

    def take(self, index: int, reduced_N: Tensor, factor: float, *, first: bool) -> None:
        """Adds `factor * reduced_N` to a unit's sum.

        Args:
            index: of the unit.
            reduced_N: its owned range, in the dtype that has travelled; may be overwritten, and is by whoever uses the
                current stream next.
            factor: 1 / ranks, for sums over ranks become means.
            first: the sum begins with it.
        """
        ...

    def clear(self) -> None:
        """Makes all sums zero: no micro step has begun any."""
        ...

    def norms(self) -> list[Tensor]:
        """Returns `block_norms` of each unit's sum, in their order, on the device."""
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
        units: all units; their `grad_sum`s are the buffers.
    """

    def __init__(self, units: Sequence[ParamUnit]) -> None:
        self._units = units

    def take(self, index: int, reduced_N: Tensor, factor: float, *, first: bool) -> None:
        """See `GradSums`: computed in fp32, where sums are fp32."""
        (set_scaled if first else add_scaled)(self._units[index].grad_sum, reduced_N, factor)

    def clear(self) -> None:
        """See `GradSums`."""
        foreach_zero([unit.grad_sum for unit in self._units])

    def norms(self) -> list[Tensor]:
        """See `GradSums`."""
        return [block_norms(unit.grad_sum) for unit in self._units]

    def read(self, index: int) -> Tensor:
        """See `GradSums`."""
        return self._units[index].grad_sum

    def edit(self, index: int) -> Tensor:
        """See `GradSums`."""
        return self._units[index].grad_sum
