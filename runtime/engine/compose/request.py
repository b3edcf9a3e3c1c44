"""What a script asks of `initialize`, looked at as far as one rank can alone: nothing is joined yet."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dsrun.config.config import Config
from dsrun.config.text.source import ConfigSource
from dsrun.contract.heartbeats import HeartbeatWriter, process_writer
from dsrun.errors import ModelError

from ...late_compiler import postpone_compiler
from ...optim.groups import GroupAssignment, assign_groups
from ..model.ownership import check_unwrapped
from .arguments import config_source
from .optimizer import OptimizerLike, SchedulerLike, check_kinds, groups_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `initialize`, see there, and what follows from them.

    Attributes:
        model: Model, which has no engine and no wrapper.
        optimizer: The script's optimizer, or a function that makes one.
        lr_scheduler: The script's schedule, or a function that makes one.
        training_data: Data to make a loader of.
        collate_fn: Function that makes a batch of samples.
        source: The config, unread.
        assignment: Optimizer groups of the parameters.
        trains_none: Whether the script names no parameter at all, as Lightning where it evaluates.
        mpu: Groups of a script that has other parallelism.
        mesh_param: Sizes that a script names, for DeepSpeed's calls.
        dist_init_required: False where the script has joined its process group already.
        heartbeat: Writer of what this rank does, for the launcher that watches it.
    """

    model: nn.Module
    optimizer: OptimizerLike | None
    lr_scheduler: SchedulerLike | None
    training_data: Dataset[Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    source: ConfigSource
    assignment: GroupAssignment
    trains_none: bool
    mpu: object
    mesh_param: Sequence[int] | None
    dist_init_required: bool | None
    heartbeat: HeartbeatWriter

    def updates(self, settings: Config) -> bool:
        """Whether there will be an optimizer: the script's or the config's."""
        return self.optimizer is not None or settings.optimizer is not None


def read_request(
    args: Namespace | Mapping[str, Any] | None,
    model: nn.Module | None,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    training_data: Dataset[Any] | None,
    lr_scheduler: SchedulerLike | None,
    *,
    config: ConfigSource | None,
    config_params: ConfigSource | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    mpu: object,
    mesh_param: Sequence[int] | None,
    dist_init_required: bool | None,
) -> Request:
    """Returns what the arguments of `initialize` ask for; see there what each one is.

    Raises:
        ConfigError: no config was given.
        ModelError: the model is none that an engine can take, or optimizer groups do not go with it.
    """
    if model is None:
        raise ModelError("dsrun.initialize: model is None", hint="pass model=, a torch.nn.Module")
    check_kinds(optimizer, lr_scheduler)
    check_unwrapped(model)
    postpone_compiler()
    source = config_source(args, config, config_params)
    heartbeat = process_writer()
    heartbeat.beat(phase="build")
    groups = groups_of(optimizer)
    given = None if model_parameters is None else list(model_parameters)
    trains_none = optimizer is None and given == []
    argument = "optimizer" if groups else "model_parameters"
    return Request(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        source=source,
        assignment=assign_groups(model, groups or (None if trains_none else given), argument=argument),
        trains_none=trains_none,
        mpu=mpu,
        mesh_param=mesh_param,
        dist_init_required=dist_init_required,
        heartbeat=heartbeat,
    )
