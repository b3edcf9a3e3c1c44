"""What scripts written for DeepSpeed call on the optimizer that they were handed: it is torch's, with these beside.

`overflow` and the loss scale, which change with every step, stand in `engine/model/ownership.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn, optim

from ..offload_states import OffloadedStates


class ParameterOffload:
    """What stands for DeepSpeed's hooks of stage 3, which TRL takes off around generation and puts on again.

    It has no hooks and no parameters: the engine's own hooks stay where they are, for a forward inside of
    `GatheredParameters` reads what that has gathered.

    Attributes:
        module: Module without parameters, to be walked over.
        forward_hooks: Always empty.
        backward_hooks: Always empty.
    """

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Does nothing: no hook was taken off."""

    def _register_hooks_recursively(self, module: nn.Module) -> None:
        """Does nothing: its older name."""


class _NoParameters(nn.Module):
    def ds_external_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that other modules have: none."""
        return []


def give_calls(optimizer: optim.Optimizer, states: OffloadedStates, *, shards_parameters: bool) -> None:
    """Gives the optimizer `offload_states` and `reload_states`, and at stage 3 an inert `parameter_offload`.

    Args:
        optimizer: optimizer that the script is handed.
        states: states that leave and come back.
        shards_parameters: whether the stage is 3, which scripts know by `parameter_offload`.
    """
    told: Any = optimizer
    told.offload_states = states.move_out
    told.reload_states = states.move_back
    if shards_parameters:
        told.parameter_offload = ParameterOffload()
