"""What scripts written for DeepSpeed call on the optimizer that they were handed: it is torch's, with these beside.

`overflow` and the loss scale, which change with every step, stand in `engine/model/ownership.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn, optim

from dsrun.config.config import Config
from dsrun.errors import ModelError

from ...optim.algorithms.deepspeed_classes import FusedAdam
from ...optim.schedules.registry import SCHEDULES
from ...optim.sharded import ShardOptimizer
from ...protocols import Scheduler
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
    script_optimizer: Any = optimizer
    script_optimizer.offload_states = states.move_out
    script_optimizer.reload_states = states.move_back
    if shards_parameters:
        script_optimizer.parameter_offload = ParameterOffload()


def name_class(optimizer: optim.Optimizer, settings: Config, *, compute: torch.dtype) -> None:
    """Says as `deepspeed_class` which of DeepSpeed's classes stands around such an optimizer there, if one does.

    `isinstance` by the classes in `runtime/deepspeed/optimizer_types.py` reads it. As DeepSpeed 0.19.8 chooses.

    Args:
        optimizer: optimizer that the script is handed.
        settings: the config.
        compute: dtype of parameters in forward.
    """
    zero = settings.zero_optimization
    is_mixed = compute == torch.bfloat16 and settings.data_types.grad_accum_dtype == "fp32"
    name = None
    if zero.stage == 3:
        name = "DeepSpeedZeroOptimizer_Stage3"
    elif zero.stage == 1 and is_mixed and zero.offload_optimizer.device == "none":
        name = "BF16_Optimizer"
    elif zero.stage > 0:
        name = "DeepSpeedZeroOptimizer"
    elif compute in (torch.float16, torch.bfloat16):
        name = "FP16_Optimizer" if type(optimizer) is FusedAdam else "FP16_UnfusedOptimizer"
    script_optimizer: Any = optimizer
    script_optimizer.deepspeed_class = name


class ScheduleNote:
    """Says once that the optimizer's own `step` leaves the config's schedule where it is, as DeepSpeed's does.

    Args:
        settings: the config.
        say: callback that prints a message once for the whole job, on rank 0.
    """

    def __init__(self, settings: Config, say: Callable[[str], None]) -> None:
        self._section = settings.scheduler
        self._say = say

    def note_step(self, scheduler: Scheduler | None) -> None:
        """Notes that the optimizer's own `step` was called.

        Args:
            scheduler: the engine's schedule; one that a script has made is the script's to step.
        """
        section = self._section
        if section is not None and type(scheduler) is SCHEDULES[section.type]:
            self._section = None
            self._say(
                f"dsrun: optimizer.step() does not step the config's schedule {section.type}: the learning rate stays "
                "unless the script calls the schedule's step(); engine.step() in its place does both"
            )


def give_step(optimizer: optim.Optimizer, shards: ShardOptimizer, update: WeakMethod[Callable[[], None]]) -> None:
    """Lets the optimizer's own `step` update the parameters, as Lightning Fabric calls it in the engine's place.

    What the engine itself calls, and what schedules have wrapped, stays below it.

    Args:
        optimizer: optimizer that the script is handed.
        shards: stepper that the engine calls.
        update: engine's update of the parameters.
    """
    own: Callable[[], Any] = optimizer.step

    # A schedule that is made later wraps the function of a bound method, and finds its marks on one that is wrapped.
    @wraps(own)
    def step(_: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        engine_step = None if shards.is_stepping else update()
        if engine_step is None:
            own()
        elif closure is not None:
            raise ModelError(
                "optimizer.step: got a closure, which nobody would call",
                hint="call engine.backward(loss) first, and step() without arguments",
            )
        else:
            engine_step()

    script_optimizer: Any = optimizer
    script_optimizer.step = MethodType(step, optimizer)
