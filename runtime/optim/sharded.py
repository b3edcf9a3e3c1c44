"""A torch optimizer over the owned ranges of all units, and its state as named tensors.

It steps; it neither reduces gradients nor publishes parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..layout.unit_layout import TENSOR_ALIGN, ShardPiece
from ..protocols import OwnedRange


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive elements of one unit's owned range that are in one optimizer group.

    Attributes:
        owned: the range it is a part of.
        group: number of the optimizer group.
        start: first element in the unit's flat buffer.
        param: fp32 leaf over the run's masters; its gradient views the run's accumulated gradient.
    """

    owned: OwnedRange
    group: int
    start: int
    param: nn.Parameter


class ShardOptimizer:
    """Updates the masters of every unit's owned range.

    Args:
        ranges: what this rank owns of every unit.
        group_count: number of optimizer groups.
    """

    def __init__(self, ranges: Sequence[OwnedRange], *, group_count: int) -> None:
        self._runs = [run for owned in ranges for run in _runs(owned)]
        self._group_count = group_count
        self.torch_optimizer: optim.Optimizer | None = None

    def shards_by_group(self) -> list[list[nn.Parameter]]:
        """Returns the leaves that a torch optimizer shall update, group by group."""
        return [[run.param for run in self._runs if run.group == group] for group in range(self._group_count)]

    def drive(self, optimizer: optim.Optimizer) -> None:
        """Says which torch optimizer holds the leaves."""
        self.torch_optimizer = optimizer

    def step(self) -> None:
        """Takes one optimizer step on the local ranges."""
        assert self.torch_optimizer is not None, "drive() was not called"
        self.torch_optimizer.step()

    def state_tensors(self) -> Iterator[tuple[ShardPiece, str, Tensor]]:
        """Yields (piece of a parameter, role, flat state of that piece): views, so writing them loads state."""
        for run in self._runs:
            for role, value in self._elementwise_state(run):
                for piece, flat in _cut(run, value):
                    yield piece, role, flat

    def state_scalars(self) -> dict[str, dict[str, float]]:
        """Returns one-number states (Adam's `step`) by parameter name and role, of the parameters on this rank."""
        scalars: dict[str, dict[str, float]] = {}
        for run in self._runs:
            single = {
                role: float(value)
                for role, value in self._state(run).items()
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
            }
            for piece, _ in _cut(run, run.param.detach()):
                if single:
                    scalars[piece.extent.name] = single
        return scalars

    def prepare_state(self, roles: Sequence[str], scalars: Mapping[str, Mapping[str, float]]) -> None:
        """Allocates state before the first step, so that a checkpoint can be loaded into it.

        Args:
            roles: names of elementwise states, zeroed here.
            scalars: one-number states by parameter name; the first parameter of a run decides.
        """
        assert self.torch_optimizer is not None, "drive() was not called"
        for run in self._runs:
            state: dict[str, Any] = {role: torch.zeros_like(run.param.detach()) for role in roles}
            for piece, _ in _cut(run, run.param.detach()):
                for role, value in scalars.get(piece.extent.name, {}).items():
                    state[role] = torch.tensor(value, dtype=torch.float32, device=run.param.device)
                break
            self.torch_optimizer.state[run.param] = state

    def elementwise_roles(self) -> list[str]:
        """Returns the names of states that have one value an element, as far as they exist."""
        return sorted({role for run in self._runs for role, _ in self._elementwise_state(run)})

    def state_tensors_in_memory(self) -> list[Tensor]:
        """Returns every state tensor, for memory reports."""
        return [value for run in self._runs for value in self._state(run).values() if isinstance(value, Tensor)]

    def _state(self, run: _Run) -> dict[str, Any]:
        assert self.torch_optimizer is not None, "drive() was not called"
        return self.torch_optimizer.state.get(run.param, {})

    def _elementwise_state(self, run: _Run) -> list[tuple[str, Tensor]]:
        return [
            (role, value)
            for role, value in self._state(run).items()
            if isinstance(value, Tensor) and value.shape == run.param.shape
        ]


def _runs(owned: OwnedRange) -> Iterator[_Run]:
    """Cuts an owned range where the optimizer group changes."""
    bounds: dict[int, tuple[int, int]] = {}
    for extent, group in zip(owned.layout.extents, owned.groups, strict=True):
        # The gap behind a tensor belongs to its run, so that runs are whole cache lines. Gaps hold zeros.
        end = -(-(extent.offset + extent.numel) // TENSOR_ALIGN) * TENSOR_ALIGN
        first, _ = bounds.get(group, (extent.offset, end))
        bounds[group] = (first, end)
    for group, (first, last) in bounds.items():
        low, high = max(owned.start, first), min(owned.start + owned.master.numel(), last)
        if low < high:
            leaf = nn.Parameter(owned.master.narrow(0, low - owned.start, high - low))
            leaf.grad = owned.grad_sum.narrow(0, low - owned.start, high - low)
            yield _Run(owned, group, low, leaf)


def _cut(run: _Run, flat: Tensor) -> Iterator[tuple[ShardPiece, Tensor]]:
    """Yields the parts of parameters inside a run, with the view of `flat` (one value an element) for each."""
    for piece in run.owned.layout.pieces(run.start, run.start + flat.numel()):
        yield piece, flat.narrow(0, piece.shard_offset, piece.stop - piece.start)
