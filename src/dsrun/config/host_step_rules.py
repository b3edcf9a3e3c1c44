"""With which stages and formats an optimizer steps in host memory."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.optimizer_params import SEES_WHOLE_TENSORS
from dsrun.config.sections.training import Training
from dsrun.config.tree import Position

_OPTIMIZER = "zero_optimization.offload_optimizer.device"


def check_host_step(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports combinations that the runtime does not take.

    Args:
        config: every key valid on its own.
        report: gets the findings.
        place_of: place of a dotted path.
    """
    device = config.zero_optimization.offload_optimizer.device
    if device == "none":
        return
    if config.zero_optimization.stage == 0:
        report.error(
            Code.COMBINATION,
            _OPTIMIZER,
            f"`{_OPTIMIZER}` is {device}, and at `zero_optimization.stage` 0 every rank would step the whole model in "
            "its host's memory",
            place_of(_OPTIMIZER),
            "set `zero_optimization.stage` to 1, which cuts that into slices; on one rank it is the same",
        )
    if config.optimizer is not None and isinstance(config.optimizer.params, SEES_WHOLE_TENSORS):
        report.error(
            Code.COMBINATION,
            _OPTIMIZER,
            f'`{_OPTIMIZER}` is {device}, which steps flat ranges, and optimizer type "{config.optimizer.type}" needs '
            "whole tensors",
            place_of(_OPTIMIZER),
            "take an elementwise one, such as AdamW, Adam, SGD, Adagrad or Lion",
        )
    key = _narrow_key(config)
    if key is not None:
        report.error(
            Code.COMBINATION,
            _OPTIMIZER,
            f"`{_OPTIMIZER}` is {device}, and `{key}` keeps masters or sums in 16 bits, which the step in host memory "
            "does not take",
            place_of(_OPTIMIZER),
            f"leave `{key}` out: in host memory fp32 masters cost the device nothing",
        )


def _narrow_key(config: Training) -> str | None:
    if config.bf16.enabled and config.bf16.bf16_master_weights_and_grads:
        return "bf16.bf16_master_weights_and_grads"
    if config.fp16.enabled and config.fp16.fp16_master_weights_and_grads:
        return "fp16.fp16_master_weights_and_grads"
    if config.data_types.grad_accum_dtype not in (None, "fp32"):
        return "data_types.grad_accum_dtype"
    return None
