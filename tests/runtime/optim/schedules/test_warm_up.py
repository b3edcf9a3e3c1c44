"""Learning rates follow DeepSpeed's formulas update by update, and resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.optim.schedules.cycle import LRRangeTest, OneCycle
from dsrun.runtime.optim.schedules.registry import SCHEDULES
from dsrun.runtime.optim.schedules.warm_up import WarmupCosineLR, WarmupDecayLR, WarmupLR, WarmupSchedule


def sgd(*rates: float) -> optim.Optimizer:
    return optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)], lr=1.0)


def rates(schedule: WarmupSchedule, updates: int) -> list[float]:
    """The rates that updates 1, 2, ... are taken with."""
    seen: list[float] = []
    for _ in range(updates):
        seen.append(schedule.get_last_lr()[0])
        schedule.step()
    return seen


def test_linear_warm_up_as_observed_in_deepspeed() -> None:
    schedule = WarmupLR(sgd(), warmup_max_lr=0.4, warmup_num_steps=4, warmup_type="linear")
    assert rates(schedule, 7) == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_logarithmic_warm_up() -> None:
    schedule = WarmupLR(sgd(), warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=6)
    expected = [0.1] + [0.1 + 0.4 * math.log(k + 1) / math.log(6) for k in range(6)] + [0.5, 0.5]
    assert rates(schedule, 9) == pytest.approx(expected)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_warm_up_of_fewer_than_two_updates_counts_as_two(steps: int) -> None:
    schedule = WarmupLR(sgd(), warmup_max_lr=1.0, warmup_num_steps=steps, warmup_type="linear")
    assert rates(schedule, 5) == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_no_maximum_takes_each_groups_own_rate() -> None:
    optimizer = sgd(0.1, 0.3)
    schedule = WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    assert schedule.get_last_lr() == [0.0, 0.0]
    schedule.step(5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3] == schedule.get_lr()


def test_decay_falls_in_a_line_to_the_minimum_and_stays() -> None:
    schedule = WarmupDecayLR(
        sgd(), total_num_steps=8, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear"
    )
    expected = [0.1, 0.1, 0.2, 0.3, 0.4] + [0.1 + 0.4 * f for f in (1, 0.75, 0.5, 0.25, 0, 0)]
    assert rates(schedule, 11) == pytest.approx(expected)


def test_cosine_falls_to_its_share_after_a_first_update_of_nothing_as_in_deepspeed() -> None:
    schedule = WarmupCosineLR(
        sgd(0.2), total_num_steps=10, warmup_min_ratio=0.1, warmup_num_steps=4, cos_min_ratio=0.05, warmup_type="linear"
    )
    warm = [0.0, 0.1, 0.1 + 0.9 / 4, 0.1 + 0.9 / 2, 0.1 + 0.9 * 3 / 4]
    falling = [0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, (k - 4 + 1) / 6))) / 2 for k in range(4, 12)]
    assert rates(schedule, 13) == pytest.approx([0.2 * share for share in warm + falling])
    assert schedule.get_last_lr() == pytest.approx([0.2 * 0.05])


@pytest.mark.parametrize("make", [
    lambda o: WarmupLR(o, warmup_num_steps=5),
    lambda o: WarmupDecayLR(o, total_num_steps=9, warmup_num_steps=3),
    lambda o: WarmupCosineLR(o, total_num_steps=9, warmup_num_steps=3, warmup_type="linear"),
])  # fmt: skip
def test_a_resumed_schedule_goes_on(make: Callable[[optim.Optimizer], WarmupSchedule]) -> None:
    whole = rates(make(sgd()), 12)
    first = make(sgd())
    assert rates(first, 5) == whole[:5]
    state = first.state_dict()
    assert state == {"last_batch_iteration": 4}
    second = make(sgd())
    second.load_state_dict(state)
    assert rates(second, 7) == whole[5:]


def test_more_warm_up_than_steps_stays_finite() -> None:
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        schedule = SCHEDULES[name](sgd(), total_num_steps=2, warmup_num_steps=6)
        assert all(math.isfinite(rate) and rate >= 0 for rate in rates(schedule, 12))


def test_what_deepspeeds_schedules_answer_is_answered() -> None:
    schedule = WarmupCosineLR(sgd(0.2), total_num_steps=10, warmup_num_steps=4, warmup_type="linear")
    assert schedule.get_lr_ratio() == 0.0
    schedule.step(2)
    assert schedule.get_lr_ratio() == 0.5
    assert schedule.get_lr() == schedule.get_last_lr() == [0.1]
    schedule.optimizer.param_groups[0]["lr"] = 0.7  # by the script
    assert (schedule.get_lr(), schedule.get_last_lr()) == ([0.1], [0.7])
    cycle = OneCycle(
        optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0), 0.1, 0.5, cycle_first_step_size=4, last_batch_iteration=-1
    )
    assert cycle.get_mom() == [(0.9, 0.99)]
    cycle.step(batch_iteration=3)
    assert cycle.get_mom() == [pytest.approx((0.8, 0.99))]
    assert OneCycle(sgd(), 0.1, 0.5).get_mom() is None


def test_rates_may_be_one_for_each_group_and_the_optimizer_in_a_wrapper() -> None:
    schedule = WarmupLR(sgd(0.1, 0.3), [0.0, 0.1], [0.2, 0.5], 4, "linear")
    schedule.step(2)
    assert schedule.get_last_lr() == pytest.approx([0.1, 0.3])
    wrapped: Any = SimpleNamespace(optimizer=sgd(0.1, 0.3))
    ranged = LRRangeTest(wrapped, lr_range_test_min_lr=[0.1, 0.2], lr_range_test_step_size=1)
    ranged.step(batch_iteration=0)
    assert ranged.get_last_lr() == [0.2, 0.4]


def test_a_count_to_begin_with_leaves_the_rates_until_the_next_step() -> None:
    schedule = WarmupLR(sgd(0.4), warmup_num_steps=4, warmup_type="linear", last_batch_iteration=1)
    assert schedule.get_last_lr() == [0.4]
    schedule.step()
    assert schedule.get_last_lr() == [0.2]


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (
            lambda o: WarmupDecayLR(o, 0, -1.0, "much", -3, "cubic"),
            [
                "WarmupDecayLR: `warmup_min_lr` is -1.0; expected a number of at least 0",
                "WarmupDecayLR: `warmup_max_lr` is 'much'; expected a number of at least 0",
                "WarmupDecayLR: `total_num_steps` is 0; expected a whole number of at least 1",
                "WarmupDecayLR: `warmup_num_steps` is -3; expected a whole number of at least 0",
                "WarmupDecayLR: `warmup_type` is 'cubic'; expected 'log' or 'linear'",
            ],
        ),
        (lambda o: WarmupLR(o, 0.5, 0.1), ["WarmupLR: `warmup_max_lr` is 0.1; expected at least `warmup_min_lr`, 0.5"]),
        (
            lambda o: WarmupLR(o, [0.1, 0.2]),
            ["WarmupLR: `warmup_min_lr` is [0.1, 0.2]; expected one number, or 1: one for each group of the optimizer"],
        ),
        (
            lambda o: WarmupCosineLR(o, 10.5, cos_min_ratio=2.0),
            [
                "WarmupCosineLR: `cos_min_ratio` is 2.0; expected a number from 0 to 1",
                "WarmupCosineLR: `total_num_steps` is 10.5; expected a whole number of at least 1",
            ],
        ),
        (
            lambda o: OneCycle(o, 0.2, 0.1, cycle_first_step_size=0, cycle_min_mom=0.95),
            [
                "OneCycle: `cycle_max_lr` is 0.1; expected at least `cycle_min_lr`, 0.2",
                "OneCycle: `cycle_first_step_size` is 0; expected a whole number of at least 1",
                "OneCycle: `cycle_max_mom` is 0.9; expected at least `cycle_min_mom`, 0.95",
            ],
        ),
        (
            lambda o: LRRangeTest(o, lr_range_test_step_size=0),
            ["LRRangeTest: `lr_range_test_step_size` is 0; expected a whole number of at least 1"],
        ),
        (lambda o: WarmupLR(None), ["WarmupLR: the optimizer is a NoneType; expected a torch.optim.Optimizer"]),
    ],
)
def test_all_numbers_that_are_wrong_are_told_at_once_and_nothing_is_written(
    make: Callable[[Any], Any], messages: list[str]
) -> None:
    optimizer = sgd(0.1)
    with pytest.raises(ModelError) as raised:
        make(optimizer)
    assert [problem.message for problem in raised.value.problems] == messages
    assert isinstance(raised.value, TypeError if "optimizer is" in messages[0] else ValueError)
    assert optimizer.param_groups[0]["lr"] == 0.1
