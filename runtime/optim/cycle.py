"""OneCycle and LRRangeTest, equal to DeepSpeed's update by update. Warm-ups are elsewhere.

Source: deepspeed/runtime/lr_schedules.py, release 0.19.8; Smith, Super-Convergence (2018) and Cyclical Learning Rates
(2017).
"""

from __future__ import annotations

import math

from torch import optim

from .schedule import CountedSchedule

#: DeepSpeed's second beta while momentum is cycled, whatever the optimizer's is.
_SECOND_BETA = 0.99


class OneCycle(CountedSchedule):
    """Up from the least to the largest rate, down again, then slowly on; momentum the other way.

    With k applied updates, from -1 on: the rate of the cycle is read at k + 1, so the first two updates differ, unlike
    those of a warm-up; before the first, momentum has its least value and not, as the cycle would have it, its largest.

    Args:
        optimizer: whose rates are set, and the first of whose `betas` where it has those.
        cycle_min_lr: rate at both ends.
        cycle_max_lr: rate at the peak.
        decay_lr_rate: after the cycle, the rate is the least one over 1 + this times the intervals since.
        cycle_first_step_size: updates of the rise.
        cycle_second_step_size: updates of the fall; None: as many.
        cycle_first_stair_count: kept and not used, as in DeepSpeed.
        cycle_second_stair_count: likewise.
        decay_step_size: updates of an interval; 0: nothing decays.
        cycle_momentum: move momentum too.
        cycle_min_mom: momentum at the peak.
        cycle_max_mom: momentum at both ends.
        decay_mom_rate: after the cycle, momentum is the largest one times 1 + this times the intervals since.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.total_size = cycle_first_step_size + second
        self.step_ratio = cycle_first_step_size / self.total_size
        self.stair_counts = (cycle_first_stair_count, cycle_second_stair_count)
        self.rates = (cycle_min_lr, cycle_max_lr)
        self.moms = (cycle_min_mom, cycle_max_mom)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer)

    def write(self) -> None:
        """See `CountedSchedule`."""
        lr, momentum = self._values()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if self.cycle_momentum:
                group["betas"] = (momentum, _SECOND_BETA)

    def _values(self) -> tuple[float, float]:
        """Returns (rate, momentum)."""
        (low, high), (least, most) = self.rates, self.moms
        if self.last_batch_iteration < 0:
            return low, least
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return low + (high - low) * height, most - (most - least) * height
        if not self.decay_step_size:
            return low, most
        intervals = (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size
        return low / (1 + self.decay_lr_rate * intervals), most * (1 + self.decay_mom_rate * intervals)

    def _height(self) -> float:
        """Returns how high in the cycle the present update is, from 0 to 1."""
        x = math.fmod((self.last_batch_iteration + 1) / self.total_size, 1.0)
        return x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)


class LRRangeTest(CountedSchedule):
    """A rate that only rises, to find where training breaks.

    Args:
        optimizer: whose rates are set.
        lr_range_test_min_lr: the first rate.
        lr_range_test_step_size: updates of an interval.
        lr_range_test_step_rate: share of the first rate that each interval adds.
        lr_range_test_staircase: add it at the end of each interval and not little by little.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        lr_range_test_min_lr: float = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.min_lr = lr_range_test_min_lr
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def write(self) -> None:
        """See `CountedSchedule`."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        lr = self.min_lr * (1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
