"""Learning-rate schedules with a warm-up, equal to DeepSpeed's update by update.

A schedule is stepped once per applied optimizer update and writes `lr` into the optimizer's groups.

[Note: the first two updates]
The count k of applied updates starts at -1 and the first step sets it to 0, at which the warm-up factor is still 0. So
the first *two* updates run at the minimum rate. Runs resumed from DeepSpeed depend on it; it is kept on purpose.
Source: deepspeed/runtime/lr_schedules.py, release 0.19.8, as observed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

from torch import optim

WarmupType = Literal["log", "linear"]


class CountedSchedule(ABC):
    """A schedule whose only state is how many updates have been applied, counted from -1.

    Args:
        optimizer: whose groups get new rates, at once and after every step.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        self.write()

    @abstractmethod
    def write(self) -> None:
        """Writes what belongs to the present count into the optimizer's groups."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Counts one applied update, or takes over a count, and writes the new rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self.write()

    def get_last_lr(self) -> list[float]:
        """Returns the rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Returns the rate of each group; DeepSpeed's name for `get_last_lr`."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the count of applied updates, which is all the state there is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a count and writes the rates that belong to it."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self.write()


class WarmupSchedule(CountedSchedule):
    """A warm-up followed by something; see [Note: the first two updates].

    Args:
        optimizer: whose groups get a new `lr`, at once and after every step.
        warmup_num_steps: updates of the warm-up; fewer than 2 count as 2.
        warmup_type: `log`: ln(k+1)/ln(W); `linear`: k/W.
    """

    def __init__(self, optimizer: optim.Optimizer, *, warmup_num_steps: int, warmup_type: WarmupType) -> None:
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    @abstractmethod
    def lr(self, base_lr: float) -> float:
        """Returns the present rate of a group whose configured rate is `base_lr`."""

    def warmup_factor(self) -> float:
        """Returns how far the warm-up has come, from 0 to 1."""
        done, total = self.last_batch_iteration, self.warmup_num_steps
        if done >= total:
            return 1.0
        if done < 0:
            return 0.0
        return done / total if self.warmup_type == "linear" else math.log(done + 1) / math.log(total)

    def write(self) -> None:
        """See `CountedSchedule`."""
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = self.lr(base_lr)


class WarmupLR(WarmupSchedule):
    """From `warmup_min_lr` up to `warmup_max_lr`, then constant.

    Args:
        optimizer: whose rates are set.
        warmup_min_lr: rate of the first two updates.
        warmup_max_lr: rate after the warm-up; None: each group's own rate.
        warmup_num_steps: updates of the warm-up.
        warmup_type: shape of the warm-up.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
    ) -> None:
        self.warmup_min_lr = warmup_min_lr
        self.warmup_max_lr = warmup_max_lr
        super().__init__(optimizer, warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)

    def lr(self, base_lr: float) -> float:
        """See `WarmupSchedule`."""
        high = base_lr if self.warmup_max_lr is None else self.warmup_max_lr
        return self.warmup_min_lr + (high - self.warmup_min_lr) * self.factor()

    def factor(self) -> float:
        """Returns the share of the way from the minimum to the maximum rate."""
        return self.warmup_factor()


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then linearly down to `warmup_min_lr` at update `total_num_steps`.

    Args:
        optimizer: whose rates are set.
        total_num_steps: optimizer updates of the whole run (not micro steps).
        warmup: as of `WarmupLR`.
    """

    def __init__(self, optimizer: optim.Optimizer, *, total_num_steps: int, **warmup: Any) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, **warmup)

    def factor(self) -> float:
        """See `WarmupLR`."""
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_factor()
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / span)


class WarmupCosineLR(WarmupSchedule):
    """From `warmup_min_ratio` of each group's rate up to it, then by a half cosine to `cos_min_ratio` of it.

    Args:
        optimizer: whose rates are set.
        total_num_steps: optimizer updates of the whole run (not micro steps).
        warmup_min_ratio: share of the rate at the first two updates.
        warmup_num_steps: updates of the warm-up.
        cos_min_ratio: share of the rate at the end.
        warmup_type: shape of the warm-up.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: WarmupType = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)

    def lr(self, base_lr: float) -> float:
        """See `WarmupSchedule`."""
        if self.last_batch_iteration < self.warmup_num_steps:
            return base_lr * (self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self.warmup_factor())
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / span)
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return base_lr * (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)
