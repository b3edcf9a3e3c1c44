"""Combinations of keys of `optimizer` and `scheduler` that are impossible, do nothing, or differ from DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.optimizer import OptimizerSection
from dsrun.config.sections.optimizer_params import AdamParams, SgdParams
from dsrun.config.sections.scheduler import (
    OneCycleLRParams,
    OneCycleParams,
    SchedulerSection,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)
from dsrun.config.text.tree import Position

PlaceOf = Callable[[str], Position]
IsGiven = Callable[[str], bool]


def check_optimizer(optimizer: OptimizerSection, report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    """Reports combinations of an optimizer's parameters.

    Args:
        optimizer: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    params = optimizer.params
    if isinstance(params, SgdParams) and params.nesterov and (params.momentum == 0 or params.dampening != 0):
        key = "optimizer.params.nesterov"
        given = f"they are {params.momentum:g} and {params.dampening:g}"
        message = f"`{key}` needs `momentum` above 0 and `dampening` 0; {given}"
        report.error(Code.COMBINATION, key, message, place_of(key))
    if not isinstance(params, AdamParams):
        return
    if params.amsgrad and not params.bias_correction:
        key = "optimizer.params.bias_correction"
        message = f"`{key}` is false and `amsgrad` is true, which no implementation has together"
        report.error(Code.COMBINATION, key, message, place_of(key), "leave one of them out")
    key = "optimizer.params.weight_decay"
    if params.torch_adam and not is_given(key) and (optimizer.type == "AdamW" or params.adam_w_mode):
        message = f"`{key}` is not set; it is 0, where DeepSpeed with `torch_adam` takes torch's 0.01"
        report.note(Code.DIFFERENT_DEFAULT, key, message, place_of("optimizer.params.torch_adam"), f"set `{key}`")
    key = "optimizer.params.adam_w_mode"
    if optimizer.type == "AdamW" and not params.adam_w_mode:
        message = f"`{key}` is false, which type `AdamW` ignores"
        report.warning(Code.NO_EFFECT, key, message, place_of(key), 'for L2 in the gradient write type "Adam"')
    elif optimizer.type == "Adam" and not is_given(key) and params.weight_decay:
        message = "type `Adam` with weight decay is AdamW, as in DeepSpeed"
        report.note(
            Code.COMBINATION,
            "optimizer.type",
            message,
            place_of("optimizer.type"),
            f"for L2 in the gradient write `{key}` false",
        )


def check_scheduler(
    scheduler: SchedulerSection,
    optimizer: OptimizerSection | None,
    report: Report,
    place_of: PlaceOf,
    is_given: IsGiven,
) -> None:
    """Reports combinations of a scheduler's parameters, and with the optimizer's.

    Args:
        scheduler: every key valid on its own.
        optimizer: section `optimizer`, with every key valid on its own; None where the script makes the optimizer.
        report: report that receives the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    params, prefix = scheduler.params, "scheduler.params"
    if isinstance(params, OneCycleParams):
        _one_cycle(params, optimizer, report, place_of)
    if isinstance(params, OneCycleLRParams):
        _one_cycle_of_torch(params, optimizer, report, place_of)
    if isinstance(params, WarmupDecayParams | WarmupCosineParams) and params.warmup_num_steps > params.total_num_steps:
        key = f"{prefix}.warmup_num_steps"
        total = f"`total_num_steps` {params.total_num_steps}"
        message = f"`{key}` {params.warmup_num_steps} is more than {total}; the rate only rises"
        report.warning(Code.COMBINATION, key, message, place_of(key))
    if isinstance(params, WarmupParams | WarmupCosineParams) and params.warmup_num_steps < 2:
        key = f"{prefix}.warmup_num_steps"
        message = f"`{key}` {params.warmup_num_steps} counts as 2, the shortest warm-up of DeepSpeed's formula"
        report.note(Code.COMBINATION, key, message, place_of(key))
    if isinstance(params, WarmupParams):
        _warmup_rates(params, optimizer, report, place_of, is_given)


def _one_cycle(params: OneCycleParams, optimizer: OptimizerSection | None, report: Report, place_of: PlaceOf) -> None:
    prefix = "scheduler.params"
    if params.cycle_max_lr < params.cycle_min_lr:
        key = f"{prefix}.cycle_max_lr"
        message = f"`{key}` {params.cycle_max_lr:g} is below `cycle_min_lr` {params.cycle_min_lr:g}"
        report.error(Code.COMBINATION, key, message, place_of(key))
    if not params.cycle_momentum:
        return
    key = f"{prefix}.cycle_max_mom"
    if params.cycle_max_mom < params.cycle_min_mom:
        message = f"`{key}` {params.cycle_max_mom:g} is below `cycle_min_mom` {params.cycle_min_mom:g}"
        report.error(Code.COMBINATION, key, message, place_of(key))
    elif params.cycle_max_mom == 1:
        message = f"`{key}` is 1 with `cycle_momentum`; expected a number below 1: the mean would never move"
        report.error(Code.COMBINATION, key, message, place_of(key))
    if optimizer is not None and not hasattr(optimizer.params, "betas"):
        key = f"{prefix}.cycle_momentum"
        message = f"`{key}` moves the first of `betas`, which {optimizer.type} has not; only the rate is cycled"
        report.note(Code.NO_EFFECT, key, message, place_of(key))


def _one_cycle_of_torch(
    params: OneCycleLRParams, optimizer: OptimizerSection | None, report: Report, place_of: PlaceOf
) -> None:
    """What torch's class refuses when it is made, or divides by zero at."""
    prefix = "scheduler.params"
    if params.pct_start * params.total_steps == 1:
        key = f"{prefix}.pct_start"
        message = f"`{key}` {params.pct_start:g} of `total_steps` {params.total_steps} is a rise of one update"
        report.error(Code.COMBINATION, key, message, place_of(key), "let it be 0, or two updates or more")
    if optimizer is None or hasattr(optimizer.params, "betas") or hasattr(optimizer.params, "momentum"):
        return
    if params.cycle_momentum:
        key = f"{prefix}.cycle_momentum"
        message = f"`{key}` is true, and {optimizer.type} has neither `betas` nor `momentum`"
        report.error(Code.COMBINATION, key, message, place_of(key), f"set `{key}` to false")


def _warmup_rates(
    params: WarmupParams, optimizer: OptimizerSection | None, report: Report, place_of: PlaceOf, is_given: IsGiven
) -> None:
    prefix = "scheduler.params"
    key = f"{prefix}.warmup_max_lr"
    if isinstance(params, WarmupDecayParams) and not is_given(key):
        message = f"`{key}` is not set; the maximum is the optimizer's `lr`, where DeepSpeed takes 0.001"
        report.note(Code.DIFFERENT_DEFAULT, key, message, place_of(prefix))
    low, high, lr = params.warmup_min_lr, params.warmup_max_lr, None if optimizer is None else optimizer.params.lr
    if high is None:
        if lr is not None and lr < low:
            key = f"{prefix}.warmup_min_lr"
            message = f"`{key}` {low:g} is above the optimizer's `lr` {lr:g}, which warm-up rises to"
            report.error(Code.COMBINATION, key, message, place_of(key), f"set `{prefix}.warmup_max_lr`, or lower it")
        return
    if lr is not None and is_given("optimizer.params.lr") and lr != high:
        message = f"`{key}` {high:g} replaces `optimizer.params.lr` {lr:g}"
        report.note(Code.COMBINATION, key, message, place_of(key))
    if high < low:
        message = f"`{key}` {high:g} is below `warmup_min_lr` {low:g}"
        report.error(Code.COMBINATION, key, message, place_of(key))
