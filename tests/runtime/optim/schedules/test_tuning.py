"""Schedules are said in words of a command line as for DeepSpeed, with its options, defaults and constants."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.optim.schedules import tuning
from dsrun.runtime.optim.schedules.registry import SCHEDULES, VALID_LR_SCHEDULES

#: What DeepSpeed 0.19.8's `add_tuning_arguments` was seen to give without a word.
DEFAULTS: dict[str, Any] = {
    "lr_schedule": None,
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}


def parse(*words: str) -> argparse.Namespace:
    return tuning.add_tuning_arguments(argparse.ArgumentParser()).parse_args(words)


def test_options_and_defaults_are_deepspeeds() -> None:
    assert vars(parse()) == DEFAULTS
    args = parse("--warmup_num_steps", "7", "--lr_range_test_staircase", "--cycle_min_lr", "1e-3")
    assert (args.warmup_num_steps, args.lr_range_test_staircase, args.cycle_min_lr) == (7, True, 0.001)


def test_this_processs_words_are_read_and_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr_schedule", "OneCycle", "--epochs", "3"])
    args, others = tuning.parse_arguments()
    assert (args.lr_schedule, others) == ("OneCycle", ["--epochs", "3"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LRRangeTest", {key: DEFAULTS[key] for key in DEFAULTS if key.startswith("lr_range")}),
        ("OneCycle", {k: DEFAULTS[k] for k in DEFAULTS if k[:5] in ("cycle", "decay") and k != "cycle_momentum"}),
        (
            "WarmupLR",
            {key: DEFAULTS[key] for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")},
        ),
        (
            "WarmupCosineLR",
            {k: DEFAULTS[k] for k in ("warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio")},
        ),
    ],
)
def test_a_section_is_made_of_the_words(name: str, expected: dict[str, Any]) -> None:
    assert tuning.get_config_from_args(parse("--lr_schedule", name)) == ({"type": name, "params": expected}, None)


def test_a_section_that_cannot_be_made_says_why() -> None:
    config, reason = tuning.get_config_from_args(parse())
    assert (config, reason) == (None, "`--lr_schedule` is not given")
    config, reason = tuning.get_config_from_args(parse("--lr_schedule", "Linear"))
    assert config is None
    assert reason is not None
    assert "WarmupLR" in reason


def test_only_what_is_given_is_written_over() -> None:
    params: dict[str, Any] = {"warmup_type": "linear", "total_num_steps": 9}
    tuning.override_params(SimpleNamespace(warmup_num_steps=3, warmup_type=None, cycle_max_lr=0.2), params)
    assert params == {"warmup_type": "linear", "total_num_steps": 9, "warmup_num_steps": 3, "cycle_max_lr": 0.2}


def test_the_rate_that_a_section_names() -> None:
    for name, key in (
        ("LRRangeTest", "lr_range_test_min_lr"),
        ("OneCycle", "cycle_max_lr"),
        ("WarmupDecayLR", "warmup_max_lr"),
    ):
        assert tuning.get_lr_from_config({"type": name, "params": {key: 0.3}}) == (0.3, "")
    for section in ({}, {"type": "WarmupLR"}, {"type": "No", "params": {}}, {"type": "WarmupCosineLR", "params": {}}):
        rate, reason = tuning.get_lr_from_config(section)
        assert rate is None
        assert reason


def test_rates_are_written_into_groups_and_tensors_stay_the_same() -> None:
    held = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": held}]
    assert tuning.update_lr(groups, [0.2, torch.tensor([0.3])]) == [0.2, pytest.approx(0.3)]
    assert groups[1]["lr"] is held


def test_an_optimizer_is_found_in_a_wrapper() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    wrapped = SimpleNamespace(optimizer=optimizer)
    assert tuning.get_torch_optimizer(optimizer) is tuning.get_torch_optimizer(wrapped) is optimizer
    with pytest.raises(ModelError, match=r"expected a torch\.optim\.Optimizer"):
        tuning.get_torch_optimizer(object())


def test_constants_name_the_schedules_and_their_parameters() -> None:
    names = {
        getattr(tuning, name)
        for name in ("LR_RANGE_TEST", "ONE_CYCLE", "WARMUP_LR", "WARMUP_DECAY_LR", "WARMUP_COSINE_LR")
    }
    assert names == set(VALID_LR_SCHEDULES) <= set(SCHEDULES)
    assert (tuning.LR_SCHEDULE, tuning.WARMUP_MIN_LR, tuning.TOTAL_NUM_STEPS) == (
        "lr_schedule",
        "warmup_min_lr",
        "total_num_steps",
    )
