"""Which optimizer and schedule train a model: the script's own, what its functions make, or the config's.

Classes and their rules are in `optim`; no step is taken here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

from dsrun.config.config import Config
from dsrun.errors import ModelError

from ...optim.groups import GroupAssignment
from ...optim.registry import OptimizerFactory, adopt, check_elementwise, factory_of
from ...optim.schedules.registry import SCHEDULES
from ...optim.sharded import ShardOptimizer
from ...protocols import Scheduler
from ..model.ownership import is_taken

OptimizerLike = optim.Optimizer | OptimizerFactory
SchedulerLike = Scheduler | Callable[[optim.Optimizer], Scheduler]


def check_kinds(optimizer: object, lr_scheduler: object) -> None:
    """Refuses what is neither an optimizer or a schedule nor a function that makes one, and an optimizer of an engine.

    Args:
        optimizer: argument of `initialize`.
        lr_scheduler: argument of `initialize`.

    Raises:
        ModelError: naming the argument.
    """
    if optimizer is not None and not isinstance(optimizer, optim.Optimizer) and not callable(optimizer):
        raise ModelError(
            f"dsrun.initialize: optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer",
            hint="or a function that makes one of group dicts; None for the config's",
        )
    if is_taken(optimizer):
        raise ModelError(
            "dsrun.initialize: optimizer is the one of an earlier engine, and steps the shards of that engine",
            hint="make a new optimizer over the model's parameters; a checkpoint of the earlier engine has its states",
        )
    if lr_scheduler is not None and not callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        raise ModelError(
            f"dsrun.initialize: lr_scheduler is a {type(lr_scheduler).__name__}, which has no `step`",
            hint="pass a schedule, or a function that makes one of the optimizer; None for the config's",
        )


def groups_of(optimizer: OptimizerLike | None) -> list[dict[str, Any]] | None:
    """Returns the group dicts of a script's optimizer; None where there is none yet."""
    return optimizer.param_groups if isinstance(optimizer, optim.Optimizer) else None


def make_optimizer(
    given: OptimizerLike | None, shards: ShardOptimizer, settings: Config, assignment: GroupAssignment
) -> optim.Optimizer | None:
    """Returns the optimizer over the shards: the script's, the one its function makes, or the config's.

    Args:
        given: optimizer, or function that makes one, from the script; used instead of the config's. None without one.
        shards: sharded optimizer that holds the shards to update and drives torch's optimizer.
        settings: config; its section `optimizer` is read.
        assignment: options of each group.

    Returns:
        None where there is none: an engine that only evaluates.

    Raises:
        ModelError: it is not known to be elementwise, or holds state already.
    """
    if isinstance(given, optim.Optimizer):
        check_elementwise(given, allow_untested=settings.zero_allow_untested_optimizer)
        adopt(given, shards.shards_by_group())
        shards.drive(given)
        return given
    section = settings.optimizer
    if given is None and section is None:
        return None
    factory = given
    if factory is None:
        assert section is not None, "checked above"
        factory = factory_of(section.type, section.params.model_dump())
    groups = [
        {"params": params, **options}
        for params, options in zip(shards.shards_by_group(), assignment.options, strict=True)
    ]
    optimizer = factory(groups)
    check_elementwise(optimizer, allow_untested=settings.zero_allow_untested_optimizer)
    shards.drive(optimizer)
    return optimizer


def make_scheduler(
    given: SchedulerLike | None, optimizer: optim.Optimizer | None, settings: Config
) -> Scheduler | None:
    """Returns the schedule: the script's, the one its function makes, or the config's; None where there is none.

    Args:
        given: schedule, or function that makes one, from the script; used instead of the config's. None without one.
        optimizer: optimizer with the learning rates that the schedule sets; None where there is none.
        settings: config; its section `scheduler` is read.

    Raises:
        ModelError: there is a schedule, and no optimizer.
    """
    section = settings.scheduler
    if given is None and section is None:
        return None
    if optimizer is None:
        raise ModelError(
            "lr_scheduler: there is a schedule, and no optimizer for it",
            hint="add an `optimizer` section, or pass optimizer=",
        )
    if given is None:
        assert section is not None, "checked above"
        return SCHEDULES[section.type](optimizer, **section.params.model_dump())
    return given(optimizer) if callable(given) else given
