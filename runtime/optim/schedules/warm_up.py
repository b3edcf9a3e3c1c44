"""Learning-rate schedules with a warm-up, equal to DeepSpeed's update by update.

A schedule is stepped once per applied optimizer update and writes `lr` into the optimizer's groups: into the tensor
that a group has there, if it has one. Numbers no schedule can work with are refused when it is made, all at once; for
a config's, that has happened before (`config/rules/optimizer.py`).

[Note: the first two updates]
The count k of applied updates starts at -1 and the first step sets it to 0, at which the warm-up factor is still 0. So
the first *two* updates run at the minimum rate. Runs resumed from DeepSpeed depend on it; it is kept on purpose.
Source: deepspeed/runtime/lr_schedules.py, release 0.19.8, as observed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from torch import optim

from ..states.option_values import plain_option, set_option
from .numbers import NoOptimizerError, ScheduleNumbers

WarmupType = Literal["log", "linear"]
#: One number, or one for each group of the optimizer.
PerGroup = float | Sequence[float]


class CountedSchedule(ABC):
    """A schedule whose only state is how many updates have been applied, counted from -1.

    Args:
        optimizer: optimizer with the groups that get new rates after every step, and at once where the count begins at
            -1.
        last_batch_iteration: count to begin with; from 0 on, the groups keep their rates until the next step.

    Raises:
        NoOptimizerError: what is given is no torch optimizer.
    """

    def __init__(self, optimizer: optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self.write()

    @abstractmethod
    def rates(self) -> list[float]:
        """Returns the rate of each group that belongs to the present count."""

    def write(self) -> None:
        """Writes what belongs to the present count into the optimizer's groups."""
        for group, rate in zip(self.optimizer.param_groups, self.rates(), strict=True):
            set_option(group, "lr", rate)

    def advance(self, count: int | None) -> None:
        """Counts one applied update, or takes over a count, and writes the new rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if count is None else count
        self.write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """See `advance`."""
        self.advance(last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Returns the rate that each group has now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Returns the rate of each group that belongs to the present count, whatever a script has set since."""
        return self.rates()

    def state_dict(self) -> dict[str, Any]:
        """Returns the count of applied updates, which is all the state there is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a count and writes the rates that belong to it."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self.write()


def torch_optimizer(optimizer: Any, schedule: str) -> optim.Optimizer:
    """Returns the torch optimizer that is given, or that a wrapper has as its `optimizer`.

    Args:
        optimizer: object that a script gives to a schedule: a torch optimizer, or a wrapper that has one as its
            `optimizer`.
        schedule: its name.

    Raises:
        NoOptimizerError: there is none.
    """
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, optim.Optimizer):
            return found
    raise NoOptimizerError(
        f"{schedule}: the optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer",
        hint="pass the optimizer itself, or to dsrun.initialize a function that makes the schedule of one",
    )


def for_each_group(value: PerGroup, optimizer: optim.Optimizer) -> list[float]:
    """Returns a number for each group: the same for all, or its own of a list, which `ScheduleNumbers` has checked."""
    if isinstance(value, Sequence):
        return [float(item) for item in value]
    return [float(value)] * len(optimizer.param_groups)


class WarmupSchedule(CountedSchedule):
    """A warm-up followed by something; see [Note: the first two updates].

    Args:
        optimizer: optimizer with the groups that get a new `lr` after every step, and at once where the count begins at
            -1.
        warmup_num_steps: updates of the warm-up; fewer than 2 count as 2.
        warmup_type: `log`: ln(k+1)/ln(W); `linear`: k/W.
        last_batch_iteration: count of applied updates to begin with, -1 before the first; see `CountedSchedule`.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        warmup_num_steps: int,
        warmup_type: WarmupType,
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        self.base_lrs = [float(plain_option(group["lr"])) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def check_counts(
        self, numbers: ScheduleNumbers, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        """Checks what all warm-ups have, and refuses whatever was noted.

        Args:
            numbers: collector that has already noted every wrong rate.
            warmup_num_steps: number of warm-up updates, exactly as the caller gave it.
            warmup_type: shape of the warm-up, exactly as the caller gave it.
            last_batch_iteration: count of applied updates to begin with, exactly as the caller gave it.

        Raises:
            ModelError: every argument that is wrong.
        """
        total: Any = getattr(self, "total_num_steps", 1)  # of those schedules that have one
        numbers.count("total_num_steps", total, least=1)
        numbers.count("warmup_num_steps", warmup_num_steps, least=0)
        numbers.one_of("warmup_type", warmup_type, ("log", "linear"))
        numbers.count("last_batch_iteration", last_batch_iteration, least=-1)
        numbers.refuse()

    def warmup_factor(self) -> float:
        """Returns how far the warm-up has come, from 0 to 1."""
        done, total = self.last_batch_iteration, self.warmup_num_steps
        if done >= total:
            return 1.0
        if done < 0:
            return 0.0
        return done / total if self.warmup_type == "linear" else math.log(done + 1) / math.log(total)


class WarmupLR(WarmupSchedule):
    """From `warmup_min_lr` up to `warmup_max_lr`, then constant.

    Args:
        optimizer: optimizer that gets the rates.
        warmup_min_lr: rate of the first two updates, of all groups or of each.
        warmup_max_lr: rate after the warm-up, of all groups or of each; None: each group's own rate.
        warmup_num_steps: updates of the warm-up.
        warmup_type: shape of the warm-up.
        last_batch_iteration: count of applied updates to begin with, -1 before the first; see `CountedSchedule`.

    Raises:
        ModelError: every argument that is wrong.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        optimizer = torch_optimizer(optimizer, type(self).__name__)
        numbers = ScheduleNumbers(type(self).__name__, optimizer)
        has_rates = numbers.per_group("warmup_min_lr", warmup_min_lr)
        if warmup_max_lr is not None:
            has_rates = numbers.per_group("warmup_max_lr", warmup_max_lr) and has_rates
        if has_rates:
            own = [float(plain_option(group["lr"])) for group in optimizer.param_groups]
            self.min_lrs = for_each_group(warmup_min_lr, optimizer)
            self.max_lrs = own if warmup_max_lr is None else for_each_group(warmup_max_lr, optimizer)
            if warmup_max_lr is not None:
                numbers.ordered("warmup_min_lr", self.min_lrs, "warmup_max_lr", self.max_lrs)
        self.check_counts(numbers, warmup_num_steps, warmup_type, last_batch_iteration)
        super().__init__(
            optimizer,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def rates(self) -> list[float]:
        """See `CountedSchedule`."""
        factor = self.factor()
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def factor(self) -> float:
        """Returns the share of the way from the minimum to the maximum rate."""
        return self.warmup_factor()


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then linearly down to `warmup_min_lr` at update `total_num_steps`.

    Args:
        optimizer: optimizer that gets the rates.
        total_num_steps: optimizer updates of the whole run (not micro steps).
        warmup_min_lr: rate of the first two updates and of the end, of all groups or of each; see `WarmupLR`.
        warmup_max_lr: rate after the warm-up, of all groups or of each; None for each group's own rate, which is the
            config's default; see `WarmupLR`.
        warmup_num_steps: number of updates of the warm-up; see `WarmupLR`.
        warmup_type: shape of the warm-up, `log` or `linear`; see `WarmupLR`.
        last_batch_iteration: count of applied updates to begin with, -1 before the first; see `CountedSchedule`.

    Raises:
        ModelError: every argument that is wrong.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def factor(self) -> float:
        """See `WarmupLR`."""
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_factor()
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / span)


class WarmupCosineLR(WarmupSchedule):
    """From `warmup_min_ratio` of each group's rate up to it, then by a half cosine to `cos_min_ratio` of it.

    The very first update is taken with 0, as DeepSpeed does, whatever `warmup_min_ratio` is.

    Args:
        optimizer: optimizer that gets the rates.
        total_num_steps: optimizer updates of the whole run (not micro steps).
        warmup_min_ratio: share of the rate at the second update.
        warmup_num_steps: updates of the warm-up.
        cos_min_ratio: share of the rate at the end.
        warmup_type: shape of the warm-up.
        last_batch_iteration: count of applied updates to begin with, -1 before the first; see `CountedSchedule`.

    Raises:
        ModelError: every argument that is wrong.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        optimizer = torch_optimizer(optimizer, type(self).__name__)
        numbers = ScheduleNumbers(type(self).__name__, optimizer)
        numbers.real("warmup_min_ratio", warmup_min_ratio, most=1.0)
        numbers.real("cos_min_ratio", cos_min_ratio, most=1.0)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.check_counts(numbers, warmup_num_steps, warmup_type, last_batch_iteration)
        super().__init__(
            optimizer,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def rates(self) -> list[float]:
        """See `CountedSchedule`."""
        ratio = self.get_lr_ratio()
        return [base_lr * ratio for base_lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Returns the share of each group's own rate that belongs to the present count."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self.warmup_factor()
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / span)
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine
