"""Combinations of keys of `optimizer` and `scheduler` that are impossible, do nothing, or differ from DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.optimizer import OptimizerSection
from dsrun.config.sections.optimizer_params import AdamParams, SgdParams
from dsrun.config.sections.scheduler import (
    OneCycleParams,
    SchedulerSection,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)
from dsrun.config.tree import Position

PlaceOf = Callable[[str], Position]
IsGiven = Callable[[str], bool]


def check_optimizer(optimizer: OptimizerSection, report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    """Reports combinations of an optimizer's parameters.

    Args:
        optimizer: every key valid on its own.
        report: gets the findings.
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
        optimizer: likewise; None where the script makes it.
        report: gets the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    params, prefix = scheduler.params, "scheduler.params"
    if isinstance(params, OneCycleParams) and params.cycle_max_lr < params.cycle_min_lr:
        key = f"{prefix}.cycle_max_lr"
        message = f"`{key}` {params.cycle_max_lr:g} is below `cycle_min_lr` {params.cycle_min_lr:g}"
        report.error(Code.COMBINATION, key, message, place_of(key))
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


def _warmup_rates(
    params: WarmupParams, optimizer: OptimizerSection | None, report: Report, place_of: PlaceOf, is_given: IsGiven
) -> None:
    prefix = "scheduler.params"
    key = f"{prefix}.warmup_max_lr"
    if isinstance(params, WarmupDecayParams) and not is_given(key):
        message = f"`{key}` is not set; the maximum is the optimizer's `lr`, where DeepSpeed takes 0.001"
        report.note(Code.DIFFERENT_DEFAULT, key, message, place_of(prefix))
    if params.warmup_max_lr is None or optimizer is None:
        return
    lr = optimizer.params.lr
    if is_given("optimizer.params.lr") and lr != params.warmup_max_lr:
        message = f"`{key}` {params.warmup_max_lr:g} replaces `optimizer.params.lr` {lr:g}"
        report.note(Code.COMBINATION, key, message, place_of(key))
    if params.warmup_max_lr < params.warmup_min_lr:
        message = f"`{key}` {params.warmup_max_lr:g} is below `warmup_min_lr` {params.warmup_min_lr:g}"
        report.error(Code.COMBINATION, key, message, place_of(key))
