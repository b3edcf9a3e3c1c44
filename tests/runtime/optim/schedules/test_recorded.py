"""Each schedule gives the rates and momentums that DeepSpeed 0.19.8 was seen to give (fixtures/deepspeed_rates)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.runtime.optim.schedules.registry import SCHEDULES, VALID_LR_SCHEDULES

#: (schedule, parameters, count to begin with, rate and first beta of both groups for each update).
RECORDED: list[Any] = json.loads(
    Path(__file__).parents[3].joinpath("fixtures", "deepspeed_rates", "rates.json").read_text()
)


def two_groups() -> optim.Optimizer:
    return optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.3, 0.6)], lr=1.0)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_rates_and_momentums_are_deepspeeds(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    cases = [case for case in RECORDED if case[0] == name]
    assert len(cases) >= 4
    for _, params, last, updates in cases:
        optimizer = two_groups()
        schedule = SCHEDULES[name](optimizer, **params, last_batch_iteration=last)
        for expected in updates:
            seen = [value for group in optimizer.param_groups for value in (group["lr"], group["betas"][0])]
            assert seen == pytest.approx(expected, abs=1e-9), (params, last)
            schedule.step()


def test_every_shape_was_recorded() -> None:
    assert {case[0] for case in RECORDED} == set(VALID_LR_SCHEDULES)
    assert {case[2] for case in RECORDED} == {-1, 4}
