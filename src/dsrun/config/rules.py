"""What no single key can say: combinations that are impossible, do nothing, or differ from DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.optimizer import OptimizerSection, SgdParams
from dsrun.config.sections.scheduler import SchedulerSection, WarmupCosineParams, WarmupDecayParams, WarmupParams
from dsrun.config.sections.training import Training
from dsrun.config.tree import Position

#: Place of a key, or of the closest thing around it that was written.
PlaceOf = Callable[[str], Position]
#: Whether a key was written.
IsGiven = Callable[[str], bool]


def check_rules(config: Training, report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    """Reports combinations.

    Args:
        config: every key valid on its own.
        report: gets the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    _one_precision(config, report, place_of)
    _clipping(report, place_of, is_given)
    if config.optimizer is not None:
        _optimizer(config.optimizer, report, place_of, is_given)
    if config.scheduler is not None:
        _scheduler(config.scheduler, config.optimizer, report, place_of, is_given)


def _one_precision(config: Training, report: Report, place_of: PlaceOf) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        message = "`fp16.enabled` and `bf16.enabled` are both true; expected one"
        report.error(
            Code.COMBINATION, "fp16.enabled", message, place_of("fp16.enabled"), "keep bf16 where the GPU has it"
        )


def _clipping(report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    if not is_given("gradient_clipping"):
        message = "`gradient_clipping` is not set; gradients are clipped at norm 1.0, as in DeepSpeed since 0.19"
        hint = 'write "gradient_clipping": 0 to train without, as DeepSpeed did before'
        report.note(Code.DIFFERENT_DEFAULT, "gradient_clipping", message, place_of(""), hint)


def _optimizer(optimizer: OptimizerSection, report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    params = optimizer.params
    if isinstance(params, SgdParams):
        if params.nesterov and (params.momentum == 0 or params.dampening != 0):
            key = "optimizer.params.nesterov"
            given = f"they are {params.momentum:g} and {params.dampening:g}"
            message = f"`{key}` needs `momentum` above 0 and `dampening` 0; {given}"
            report.error(Code.COMBINATION, key, message, place_of(key))
        return
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


def _scheduler(
    scheduler: SchedulerSection,
    optimizer: OptimizerSection | None,
    report: Report,
    place_of: PlaceOf,
    is_given: IsGiven,
) -> None:
    params, prefix = scheduler.params, "scheduler.params"
    if not isinstance(params, WarmupParams) and params.warmup_num_steps > params.total_num_steps:
        key = f"{prefix}.warmup_num_steps"
        total = f"`total_num_steps` {params.total_num_steps}"
        message = f"`{key}` {params.warmup_num_steps} is more than {total}; the rate only rises"
        report.warning(Code.COMBINATION, key, message, place_of(key))
    if params.warmup_num_steps < 2:
        key = f"{prefix}.warmup_num_steps"
        message = f"`{key}` {params.warmup_num_steps} counts as 2, the shortest warm-up of DeepSpeed's formula"
        report.note(Code.COMBINATION, key, message, place_of(key))
    if isinstance(params, WarmupCosineParams):
        return
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
