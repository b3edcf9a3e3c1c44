"""With which stages and formats an optimizer steps in host memory."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.optimizer_table import row_of
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position

PlaceOf = Callable[[str], Position]

_SECTION = "zero_optimization.offload_optimizer"
_OPTIMIZER = f"{_SECTION}.device"
_FORMAT = f"{_SECTION}.state_format"
_SPLIT = f"{_SECTION}.split_master"


def check_host_step(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Reports combinations that the runtime does not take.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
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
    if config.optimizer is not None and not (row := row_of(config.optimizer.type)).is_elementwise:
        hint = "take an elementwise one, such as AdamW, Adam, SGD, Adagrad or Lion"
        if row.plain is not None:
            hint = f'for states in 8 bits take "{row.plain}", and set `{_FORMAT}` to "int8"'
        report.error(
            Code.COMBINATION,
            _OPTIMIZER,
            f'`{_OPTIMIZER}` is {device}, which steps flat ranges, and optimizer type "{config.optimizer.type}" needs '
            "whole tensors",
            place_of(_OPTIMIZER),
            hint,
        )
    narrow = _narrow(config)
    if narrow is not None:
        key, reason, hint = narrow
        message = f"`{_OPTIMIZER}` is {device}, and `{key}` keeps masters or sums in 16 bits, {reason}"
        report.error(Code.COMBINATION, _OPTIMIZER, message, place_of(_OPTIMIZER), hint)
    _state_format(config, report, place_of)
    _split_master(config, report, place_of)


def _narrow(config: Training) -> tuple[str, str, str] | None:
    """Returns the key that asks for 16 bits, why that is not done here, and the way out."""
    masters = "where fp32 ones take no byte of the GPU and lose no update"
    for name, on in (
        ("bf16.bf16_master_weights_and_grads", config.bf16.enabled and config.bf16.bf16_master_weights_and_grads),
        ("fp16.fp16_master_weights_and_grads", config.fp16.enabled and config.fp16.fp16_master_weights_and_grads),
    ):
        if on:
            return name, masters, f'leave `{name}` out; `{_FORMAT}` "bf16" or "int8" halves or quarters the states'
    if config.data_types.grad_accum_dtype not in (None, "fp32"):
        key = "data_types.grad_accum_dtype"
        reason = "and sums leave the GPU as the fp32 numbers that their norm is taken of"
        hint = f"leave `{key}` out; one large micro batch a step needs no sums at all"
        return key, reason, hint
    return None


def _state_format(config: Training, report: Report, place_of: PlaceOf) -> None:
    """States in fewer bits: for optimizers whose states decay, and all of them in one place."""
    section = config.zero_optimization.offload_optimizer
    if section.state_format == "fp32":
        return
    said = f'`{_FORMAT}` is "{section.state_format}"'
    if section.ratio != 1:
        message = f"{said}, and `ratio` beside it is {section.ratio}: states that stay on the GPU lie in fp32"
        report.error(Code.COMBINATION, _FORMAT, message, place_of(_FORMAT), "leave out one of them")
    if section.super_offload:
        message = f"{said}, and `super_offload` beside it is true, which keeps all states twice in fp32"
        report.error(Code.COMBINATION, _FORMAT, message, place_of(_FORMAT), "leave out one of them")
    optimizer = config.optimizer
    if optimizer is None or not row_of(optimizer.type).is_elementwise:
        return
    if not row_of(optimizer.type).states_decay:
        message = (
            f'{said}, and states of optimizer type "{optimizer.type}" do not all decay: what is rounded off adds up'
        )
        hint = "take AdamW, Adam, Lion or SGD, or leave it out"
        report.error(Code.COMBINATION, _FORMAT, message, place_of(_FORMAT), hint)


def _split_master(config: Training, report: Report, place_of: PlaceOf) -> None:
    """The upper half of a master is a bf16 parameter beside it in host memory, and nowhere else."""
    zero, section = config.zero_optimization, config.zero_optimization.offload_optimizer
    if not section.split_master or zero.stage != 3:
        return
    device = zero.offload_param.device
    reasons = {
        f"`device` beside it is {section.device}: on a drive a master is one stretch with its states": (
            section.device != "cpu"
        ),
        f"`zero_optimization.offload_param.device` is {device}: without parameters in host memory both halves lie "
        "there, as many bytes as a master": device != "cpu",
        "`bf16.enabled` is not: the upper half of an fp32 number is a bf16 one": not config.bf16.enabled,
        f"`ratio` beside it is {section.ratio}: masters that stay on the GPU are whole": section.ratio != 1,
        "`super_offload` beside it is true, which keeps whole masters twice": section.super_offload,
    }
    for reason, holds in reasons.items():
        if holds:
            message = f"`{_SPLIT}` is true, and {reason}"
            report.error(Code.COMBINATION, _SPLIT, message, place_of(_SPLIT), "leave out one of them")
