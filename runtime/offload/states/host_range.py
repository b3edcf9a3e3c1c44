"""One range as the host steps it: where its masters lie, where its parameters go, and what an optimizer does to it.

Values and one call; when ranges are stepped, and in which thread, is `offload/step/cpu_optimizer.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...optim.structure.runs import Run
from .split_masters import UnitHalves


@dataclass(frozen=True, slots=True, eq=False)
class HostRange:
    """What a rank updates of one unit, in host memory.

    Attributes:
        label: name of the unit, for messages.
        runs: parts of it that share a leaf of the optimizer, in order; others, where they are cut between steps.
        master_N: flat, the whole range.
        target_N: compute dtype, [N]: the parameters. On the device, to be reached over the bus, or `stays`.
        stays: the parameters live in host memory, where the step writes them.
        halves: masters in two halves, of which the upper one is `target_N`; None where `master_N` has the masters.
        sink: function that takes the parameters from host memory to another place, such as a disk; None where they stay
            in host memory or go to the device.
    """

    label: str
    runs: Sequence[Run]
    master_N: Tensor
    target_N: Tensor
    stays: bool = False
    sink: Callable[[Tensor], None] | None = None
    halves: UnitHalves | None = None

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.master_N.numel()

    @property
    def is_its_parameters(self) -> bool:
        """Whether the masters are what goes to the device, or lies where parameters are: nothing is rounded."""
        if self.halves is not None:
            return True
        if self.stays:
            return self.master_N.data_ptr() == self.target_N.data_ptr()
        return self.master_N.dtype == self.target_N.dtype

    def has_any(self, names: Collection[str]) -> bool:
        """Whether a tensor of that name has elements here."""
        return any(piece.extent.name in names for run in self.runs for piece in run.pieces())

    @property
    def end(self) -> int:
        """One past the last element of a run; padding follows."""
        return max((run.start - run.owned.start + run.numel for run in self.runs), default=0)


def part_of(run: Run, flat_N: Tensor) -> Tensor:
    """Returns a run's part of a tensor over its whole range."""
    return flat_N.narrow(0, run.start - run.owned.start, run.numel)
