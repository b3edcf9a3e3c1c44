"""Schedules as words of a command line, and the words themselves, by DeepSpeed's names: for scripts that read them.

The schedules are in `warm_up` and `cycle`. A config's section is read elsewhere (`dsrun.config`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, optim

from ..states.option_values import set_option
from .registry import VALID_LR_SCHEDULES
from .warm_up import torch_optimizer

__all__ = [
    "COS_MIN_RATIO",
    "CYCLE_FIRST_STAIR_COUNT",
    "CYCLE_FIRST_STEP_SIZE",
    "CYCLE_MAX_LR",
    "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM",
    "CYCLE_SECOND_STAIR_COUNT",
    "CYCLE_SECOND_STEP_SIZE",
    "DECAY_LR_RATE",
    "DECAY_MOM_RATE",
    "DECAY_STEP_SIZE",
    "EDGE_VALUE",
    "LR_RANGE_TEST",
    "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE",
    "LR_RANGE_TEST_STEP_RATE",
    "LR_RANGE_TEST_STEP_SIZE",
    "LR_SCHEDULE",
    "MID_VALUE",
    "ONE_CYCLE",
    "TOTAL_NUM_STEPS",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LINEAR_RATE",
    "WARMUP_LOG_RATE",
    "WARMUP_LR",
    "WARMUP_MAX_LR",
    "WARMUP_MIN_LR",
    "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS",
    "WARMUP_TYPE",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupCosineLR_params",
    "override_warmupLR_params",
    "parse_arguments",
    "update_lr",
]

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

#: Options of the command line, with DeepSpeed's defaults: numbers are of their default's type, False is a switch.
_OPTIONS: Mapping[str, tuple[int | float | bool | str | None, str]] = {
    LR_SCHEDULE: (None, "schedule of the learning rate, by name"),
    LR_RANGE_TEST_MIN_LR: (0.001, "first rate of the range test"),
    LR_RANGE_TEST_STEP_RATE: (1.0, "share of the first rate that each interval of the range test adds"),
    LR_RANGE_TEST_STEP_SIZE: (1000, "updates of an interval of the range test"),
    LR_RANGE_TEST_STAIRCASE: (False, "rise at the end of each interval of the range test"),
    CYCLE_FIRST_STEP_SIZE: (1000, "updates of the cycle's rise"),
    CYCLE_FIRST_STAIR_COUNT: (-1, "stairs of the cycle's rise"),
    CYCLE_SECOND_STEP_SIZE: (-1, "updates of the cycle's fall"),
    CYCLE_SECOND_STAIR_COUNT: (-1, "stairs of the cycle's fall"),
    DECAY_STEP_SIZE: (1000, "updates of an interval after the cycle"),
    CYCLE_MIN_LR: (0.01, "rate at both ends of the cycle"),
    CYCLE_MAX_LR: (0.1, "rate at the cycle's peak"),
    DECAY_LR_RATE: (0.0, "decay of the rate after the cycle"),
    "cycle_momentum": (False, "move momentum too"),
    CYCLE_MIN_MOM: (0.8, "momentum at the cycle's peak"),
    CYCLE_MAX_MOM: (0.9, "momentum at both ends of the cycle"),
    DECAY_MOM_RATE: (0.0, "growth of momentum after the cycle"),
    WARMUP_MIN_LR: (0.0, "rate at the start of the warm-up"),
    WARMUP_MAX_LR: (0.001, "rate after the warm-up"),
    WARMUP_NUM_STEPS: (1000, "updates of the warm-up"),
    WARMUP_TYPE: (WARMUP_LOG_RATE, "shape of the warm-up, log or linear"),
    WARMUP_MIN_RATIO: (0.01, "share of the rate at the start of the warm-up, for WarmupCosineLR"),
    COS_MIN_RATIO: (0.01, "share of the rate at the end of the cosine"),
}
_RANGE_TEST = (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE)
_CYCLE = (
    *(CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT),
    *(DECAY_STEP_SIZE, CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE, CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE),
)
_WARM_UP = (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE)
_COSINE = (WARMUP_NUM_STEPS, WARMUP_TYPE, WARMUP_MIN_RATIO, COS_MIN_RATIO)
#: Parameter that is the largest rate of a schedule; WarmupCosineLR has none, its rates are shares of the optimizer's.
_LARGEST = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds an option for each parameter of the schedules; returns the parser."""
    group = parser.add_argument_group("learning rate", "schedule of the learning rate and its parameters")
    for name, (default, text) in _OPTIONS.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=str if default is None else type(default), default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of this process's command line that `add_tuning_arguments` knows, and all other words."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_lr_range_test_params(args: object, params: MutableMapping[str, Any]) -> None:
    """Writes the parameters of LRRangeTest that the arguments have into `params`."""
    _override(args, params, _RANGE_TEST)


def override_1cycle_params(args: object, params: MutableMapping[str, Any]) -> None:
    """Writes the parameters of OneCycle that the arguments have into `params`."""
    _override(args, params, _CYCLE)


def override_warmupLR_params(args: object, params: MutableMapping[str, Any]) -> None:
    """Writes the parameters of WarmupLR that the arguments have into `params`."""
    _override(args, params, _WARM_UP)


def override_warmupCosineLR_params(args: object, params: MutableMapping[str, Any]) -> None:
    """Writes the parameters of WarmupCosineLR that the arguments have into `params`."""
    _override(args, params, _COSINE)


def override_params(args: object, params: MutableMapping[str, Any]) -> None:
    """Writes all parameters of schedules that the arguments have into `params`."""
    _override(args, params, (*_RANGE_TEST, *_CYCLE, *_WARM_UP, *_COSINE))


def get_config_from_args(args: object) -> tuple[dict[str, Any] | None, str | None]:
    """Returns the config's section that the arguments say, and None; or None, and why there is none."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"`--{LR_SCHEDULE}` is not given"
    if name not in VALID_LR_SCHEDULES:
        return None, f"`--{LR_SCHEDULE} {name}`; expected one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    names = {LR_RANGE_TEST: _RANGE_TEST, ONE_CYCLE: _CYCLE, WARMUP_COSINE_LR: _COSINE}
    _override(args, params, names.get(name, _WARM_UP))
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the rate that a config's section names (the first of a range test, else the largest), and an empty word.

    Args:
        config: section `scheduler` of a config.

    Returns:
        None, and the reason, where it names none.
    """
    for key in ("type", "params"):
        if key not in config:
            return None, f"`scheduler` has no `{key}`"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"`scheduler.type` is {name!r}; expected one of {', '.join(VALID_LR_SCHEDULES)}"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} has no rate of its own: it takes shares of the optimizer's"
    return config["params"][_LARGEST.get(name, WARMUP_MAX_LR)], ""


def get_torch_optimizer(optimizer: Any) -> optim.Optimizer:
    """Returns the torch optimizer that is given, or that a wrapper has as its `optimizer`.

    Raises:
        NoOptimizerError: there is none.
    """
    return torch_optimizer(optimizer, "get_torch_optimizer")


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Writes a rate into each group, into the tensor that a group has there if it has one.

    Args:
        param_groups: groups of an optimizer.
        lrs: rates, one for each group.

    Returns:
        what the groups have now.
    """
    for group, rate in zip(param_groups, lrs, strict=False):
        is_written = isinstance(rate, Tensor) and isinstance(group["lr"], Tensor)
        set_option(group, "lr", rate.squeeze() if is_written else rate)
    return [group["lr"] for group in param_groups]


def _override(args: object, params: MutableMapping[str, Any], names: Sequence[str]) -> None:
    """Writes those of the arguments into `params` that are there and not None."""
    found = {name: getattr(args, name, None) for name in names}
    params.update({name: value for name, value in found.items() if value is not None})
