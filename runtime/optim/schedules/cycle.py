"""OneCycle and LRRangeTest, equal to DeepSpeed's update by update. Warm-ups are elsewhere.

Source: deepspeed/runtime/lr_schedules.py, release 0.19.8; Smith, Super-Convergence (2018) and Cyclical Learning Rates
(2017).
"""

from __future__ import annotations

import logging
import math

from torch import optim

from ..states.option_values import set_option
from .numbers import ScheduleNumbers
from .warm_up import CountedSchedule, PerGroup, for_each_group, torch_optimizer

#: DeepSpeed's second beta while momentum is cycled, whatever the optimizer's is.
_SECOND_BETA = 0.99

_log = logging.getLogger(__name__)


class _Cycle(CountedSchedule):
    """A schedule whose `step` names its argument as DeepSpeed's of this kind do."""

    def step(self, batch_iteration: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `CountedSchedule.advance`."""
        self.advance(batch_iteration)


class OneCycle(_Cycle):
    """Up from the least to the largest rate, down again, then slowly on; momentum the other way.

    With k applied updates, from -1 on: the rate of the cycle is read at k + 1, so the first two updates differ, unlike
    those of a warm-up; before the first, momentum has its least value and not, as the cycle would have it, its largest.

    Args:
        optimizer: optimizer that gets the rates; with `cycle_momentum` it gets new `betas` too, where all of its groups
            have those.
        cycle_min_lr: rate at both ends, of all groups or of each.
        cycle_max_lr: rate at the peak, of all groups or of each.
        decay_lr_rate: decay of the rate after the cycle: the rate is the least one / (1 + this * intervals since the
            cycle).
        cycle_first_step_size: updates of the rise.
        cycle_second_step_size: updates of the fall; None: as many; 0: the rate falls at once.
        cycle_first_stair_count: number of stairs of the rise, on which rate and momentum stay; 0 or -1: they move with
            every update.
        cycle_second_stair_count: number of stairs of the fall; None: as many as of the rise.
        decay_step_size: updates of an interval; 0: nothing decays.
        cycle_momentum: move momentum too.
        cycle_min_mom: momentum at the peak, of all groups or of each.
        cycle_max_mom: momentum at both ends, of all groups or of each.
        decay_mom_rate: growth of momentum after the cycle: momentum is the largest one * (1 + this * intervals since
            the cycle).
        last_batch_iteration: count of applied updates to begin with, -1 before the first; see `CountedSchedule`.

    Raises:
        ModelError: every argument that is wrong.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        optimizer = torch_optimizer(optimizer, "OneCycle")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        numbers = ScheduleNumbers("OneCycle", optimizer)
        has_rates = numbers.per_group("cycle_min_lr", cycle_min_lr)
        if numbers.per_group("cycle_max_lr", cycle_max_lr) and has_rates:
            self.min_lrs = for_each_group(cycle_min_lr, optimizer)
            self.max_lrs = for_each_group(cycle_max_lr, optimizer)
            numbers.ordered("cycle_min_lr", self.min_lrs, "cycle_max_lr", self.max_lrs)
        numbers.real("decay_lr_rate", decay_lr_rate)
        numbers.count("cycle_first_step_size", cycle_first_step_size, least=1)
        if cycle_second_step_size is not None:
            numbers.count("cycle_second_step_size", second, least=0)
        numbers.count("cycle_first_stair_count", cycle_first_stair_count, least=-1)
        if cycle_second_stair_count is not None:
            numbers.count("cycle_second_stair_count", cycle_second_stair_count, least=-1)
        numbers.count("decay_step_size", decay_step_size, least=0)
        has_moms = numbers.per_group("cycle_min_mom", cycle_min_mom, most=1.0)
        if numbers.per_group("cycle_max_mom", cycle_max_mom, most=1.0) and has_moms:
            self.min_moms = for_each_group(cycle_min_mom, optimizer)
            self.max_moms = for_each_group(cycle_max_mom, optimizer)
            if cycle_momentum:
                numbers.ordered("cycle_min_mom", self.min_moms, "cycle_max_mom", self.max_moms)
        numbers.real("decay_mom_rate", decay_mom_rate)
        numbers.count("last_batch_iteration", last_batch_iteration, least=-1)
        numbers.refuse()
        self.total_size = cycle_first_step_size + second
        self.step_ratio = cycle_first_step_size / self.total_size
        self.first_step_size, self.second_step_size = cycle_first_step_size, second
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            kind = type(optimizer).__name__
            _log.warning("OneCycle: `cycle_momentum` moves `betas`, which %s has not; only the rate is cycled", kind)
        super().__init__(optimizer, last_batch_iteration)

    def write(self) -> None:
        """See `CountedSchedule`."""
        super().write()
        if self.cycle_momentum:
            momentums = self.min_moms if self.last_batch_iteration < 0 else self._momentums()
            for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
                set_option(group, "betas", (momentum, _SECOND_BETA))

    def rates(self) -> list[float]:
        """See `CountedSchedule`."""
        height = self._height()
        if height is not None:
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.decay_lr_rate * self._intervals()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the betas of each group that belong to the present count; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [(momentum, _SECOND_BETA) for momentum in self._momentums()]

    def _momentums(self) -> list[float]:
        """Returns the momentum of each group that the cycle has at the present count."""
        height = self._height()
        if height is not None:
            return [most - (most - least) * height for least, most in zip(self.min_moms, self.max_moms, strict=True)]
        return [most * (1 + self.decay_mom_rate * self._intervals()) for most in self.max_moms]

    def _intervals(self) -> float:
        """Returns the intervals since the end of the cycle; 0 where nothing decays."""
        if not self.decay_step_size:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _height(self) -> float | None:
        """Returns how high in the cycle the present update is, from 0 to 1; None after it."""
        if self.last_batch_iteration >= self.total_size:
            return None
        done = (self.last_batch_iteration + 1) % self.total_size
        rises = done <= self.first_step_size
        stairs = self.first_stair_count if rises else self.second_stair_count
        if stairs > 0:
            # Of whole numbers: a quotient may lie just below a stair.
            return ((done * stairs // self.first_step_size) if rises else self._left(done, stairs)) / stairs
        x = done / self.total_size
        return x / self.step_ratio if rises else (x - 1) / (self.step_ratio - 1)

    def _left(self, done: int, stairs: int) -> int:
        """Returns the stairs that are left of the fall."""
        return (self.total_size - done) * stairs // self.second_step_size


class LRRangeTest(_Cycle):
    """A rate that only rises, to find where training breaks.

    Args:
        optimizer: optimizer that gets the rates.
        lr_range_test_min_lr: the first rate, of all groups or of each.
        lr_range_test_step_size: updates of an interval.
        lr_range_test_step_rate: share of the first rate that each interval adds.
        lr_range_test_staircase: add it at the end of each interval and not little by little.
        last_batch_iteration: count of applied updates to begin with, -1 before the first; see `CountedSchedule`.

    Raises:
        ModelError: every argument that is wrong.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        optimizer = torch_optimizer(optimizer, "LRRangeTest")
        numbers = ScheduleNumbers("LRRangeTest", optimizer)
        numbers.per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        numbers.count("lr_range_test_step_size", lr_range_test_step_size, least=1)
        numbers.real("lr_range_test_step_rate", lr_range_test_step_rate)
        numbers.count("last_batch_iteration", last_batch_iteration, least=-1)
        numbers.refuse()
        self.min_lrs = for_each_group(lr_range_test_min_lr, optimizer)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self) -> list[float]:
        """See `CountedSchedule`."""
        intervals = 0.0 if self.last_batch_iteration < 0 else (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [low * increase for low in self.min_lrs]
