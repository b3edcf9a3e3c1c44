"""OneCycle and LRRangeTest follow DeepSpeed's formulas update by update, and resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.config.sections.scheduler import SCHEDULERS
from dsrun.runtime.optim.schedules.cycle import LRRangeTest, OneCycle
from dsrun.runtime.optim.schedules.registry import SCHEDULES

CYCLE: dict[str, Any] = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 0.5,
    "cycle_first_step_size": 4,
    "cycle_second_step_size": 2,
    "decay_step_size": 2,
    "decay_lr_rate": 1.0,
    "decay_mom_rate": 0.1,
}


def adam(lr: float = 1.0) -> optim.Optimizer:
    return optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=lr)


def seen(schedule: Any, optimizer: optim.Optimizer, updates: int) -> list[tuple[float, float]]:
    """(rate, first beta) that updates 1, 2, ... are taken with."""
    found: list[tuple[float, float]] = []
    for _ in range(updates):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"][0]))
        schedule.step()
    return found


def test_one_cycle_rises_falls_and_decays_with_momentum_against_it() -> None:
    optimizer = adam()
    found = seen(OneCycle(optimizer, **CYCLE), optimizer, 11)
    # At construction rate and momentum have their least values; then k = 0, 1, ... is read at k + 1 of 6 updates.
    heights = [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    cycle = [(0.1 + 0.4 * h, 0.9 - 0.1 * h) for h in heights]
    decay = [(0.1 / (1 + n / 2), 0.9 * (1 + 0.1 * n / 2)) for n in (1, 2, 3, 4)]
    for pair, expected in zip(found, [(0.1, 0.8), *cycle, *decay], strict=True):
        assert pair == pytest.approx(expected)
    assert all(group["betas"][1] == 0.99 for group in optimizer.param_groups)


def test_without_decay_the_ends_stay() -> None:
    optimizer = adam()
    params: dict[str, Any] = {**CYCLE, "decay_step_size": 0}
    found = seen(OneCycle(optimizer, **params), optimizer, 10)
    for pair in found[7:]:
        assert pair == pytest.approx((0.1, 0.9))


def test_momentum_stays_where_it_is_not_cycled_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = adam()
    assert {beta for _, beta in seen(OneCycle(optimizer, **CYCLE, cycle_momentum=False), optimizer, 9)} == {0.9}
    sgd = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert not caplog.messages
    schedule = OneCycle(sgd, **CYCLE)
    assert caplog.messages == ["OneCycle: `cycle_momentum` moves `betas`, which SGD has not; only the rate is cycled"]
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.2])
    assert "betas" not in sgd.param_groups[0]


@pytest.mark.parametrize(
    ("staircase", "expected"),
    [(False, [0.1, 0.15, 0.2, 0.25, 0.3]), (True, [0.1, 0.1, 0.2, 0.2, 0.3])],
)
def test_a_range_test_only_rises(staircase: bool, expected: list[float]) -> None:
    optimizer = adam()
    schedule = LRRangeTest(
        optimizer, lr_range_test_min_lr=0.1, lr_range_test_step_size=2, lr_range_test_staircase=staircase
    )
    assert [rate for rate, _ in seen(schedule, optimizer, 5)] == pytest.approx(expected)


#: Parameters that a config needs where a schedule has no default, with which it moves within a dozen updates.
NEEDED: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 10, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 4},
    "OneCycle": CYCLE,
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [3, 5]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 30},
}


def make(name: str) -> Callable[[optim.Optimizer], Any]:
    params = SCHEDULERS.models[name].model_validate(NEEDED.get(name, {})).model_dump()
    return lambda optimizer: SCHEDULES[name](optimizer, **params)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no optimizer steps here
@pytest.mark.parametrize("name", SCHEDULERS.models)
def test_every_schedule_of_the_config_is_built_and_goes_on_from_its_state(name: str) -> None:
    optimizer = adam(0.1)
    whole = seen(make(name)(optimizer), optimizer, 12)
    assert len(set(whole)) > 1, "it moves"
    first_optimizer = adam(0.1)
    first = make(name)(first_optimizer)
    assert seen(first, first_optimizer, 5) == whole[:5]
    second_optimizer = adam(0.1)
    second = make(name)(second_optimizer)
    # As a checkpoint does: hyperparameters first, then the schedule.
    for group, saved in zip(second_optimizer.param_groups, first_optimizer.param_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    second.load_state_dict(first.state_dict())
    assert seen(second, second_optimizer, 7) == whole[5:]


def test_config_and_runtime_have_the_same_schedules() -> None:
    assert set(SCHEDULERS.models) == set(SCHEDULES)
