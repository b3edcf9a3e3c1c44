"""Combinations of keys of the number formats that are impossible, or that no optimizer here can do."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.optimizer_params import AdamParams, SgdParams
from dsrun.config.sections.optimizer_table import row_of
from dsrun.config.sections.precision import Fp16
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position

PlaceOf = Callable[[str], Position]

#: 2 to this power is the largest fp32 number that is a power of 2.
_LARGEST_SCALE_POWER = 127
_SUMS = "data_types.grad_accum_dtype"
_BF16_MASTERS, _BF16_STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
_FP16_MASTERS = "fp16.fp16_master_weights_and_grads"


def check_precision(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Reports combinations of number formats.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
    """
    _one_mode(config, report, place_of)
    _masters(config, report, place_of)
    _sums(config, report, place_of)
    _param_dtype(config, report, place_of)
    _kept(config, report, place_of)
    _autocast(config, report, place_of)
    _light_traffic(config, report, place_of)
    _loss_scale(config.fp16, report, place_of)
    _fp8(config, report, place_of)


def _one_mode(config: Training, report: Report, place_of: PlaceOf) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        message = "`fp16.enabled` and `bf16.enabled` are both true; expected one"
        report.error(
            Code.COMBINATION, "fp16.enabled", message, place_of("fp16.enabled"), "keep bf16 where the GPU has it"
        )


def _masters(config: Training, report: Report, place_of: PlaceOf) -> None:
    """16-bit masters, and which optimizers can update them."""
    bf16 = config.bf16
    if bf16.enabled and bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        message = f"`{_BF16_STATES}` is true and `{_BF16_MASTERS}` is not; expected both, as in DeepSpeed"
        hint = f'set `{_BF16_MASTERS}`, or take `optimizer.type` "Adam8bit": states of 2 bytes a pair over fp32 masters'
        report.error(Code.COMBINATION, _BF16_STATES, message, place_of(_BF16_STATES), hint)
    key = _masters_key(config)
    if key is None or config.optimizer is None:
        return
    kind, params = config.optimizer.type, config.optimizer.params
    if bf16.enabled and bf16.bf16_optimizer_states:
        if not isinstance(params, (AdamParams, SgdParams)):
            message = f'`{key}` is true with optimizer type "{kind}", which keeps fp32; expected Adam, AdamW or SGD'
            report.error(Code.COMBINATION, key, message, place_of(key))
    elif not row_of(kind).is_elementwise:
        _refuse_optimizer(key, "true", kind, report, place_of)


def _sums(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Formats in which gradients are added up."""
    sums, masters = config.data_types.grad_accum_dtype, _masters_key(config)
    if sums is None:
        return
    if masters is not None:
        mode = "bf16" if config.bf16.enabled else "fp16"
        if sums != mode:
            message = f'`{_SUMS}` is "{sums}", and `{masters}` is true, which adds gradients up in {mode}'
            report.error(Code.COMBINATION, _SUMS, message, place_of(_SUMS), "leave out one of them")
    elif sums != "fp32" and config.optimizer is not None and not row_of(config.optimizer.type).is_elementwise:
        _refuse_optimizer(_SUMS, f'"{sums}"', config.optimizer.type, report, place_of)
    if sums == "fp16" and not config.fp16.enabled:
        message = f'`{_SUMS}` is "fp16" without `fp16.enabled`: no loss scale keeps gradients in its range'
        report.warning(Code.COMBINATION, _SUMS, message, place_of(_SUMS), f'"bf16" for `{_SUMS}` has the range of fp32')


def _param_dtype(config: Training, report: Report, place_of: PlaceOf) -> None:
    asked, key = config.data_types.param_dtype, "data_types.param_dtype"
    mode = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    if asked is not None and asked != mode:
        message = f'`{key}` is "{asked}", and parameters are {mode} here; expected the same'
        hint = f"leave out `{key}`" if asked == "fp32" else f"set `{asked}.enabled`, or leave out `{key}`"
        report.error(Code.COMBINATION, key, message, place_of(key), hint)


def _kept(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Modules that stay in fp32 need masters in it, and the optimizer beside them."""
    key = "data_types.keep_in_fp32_modules"
    if config.data_types.keep_in_fp32_modules in ("auto", ()):
        return
    masters, zero = _masters_key(config), config.zero_optimization
    if masters is not None:
        message = f"`{key}` is set, and `{masters}` is true: no master is in fp32"
        report.error(Code.COMBINATION, key, message, place_of(key), "leave out one of them")
    for name, device in (
        ("offload_optimizer", zero.offload_optimizer.device),
        ("offload_param", zero.offload_param.device),
    ):
        if device != "none" and (config.fp16.enabled or config.bf16.enabled):
            message = f'`{key}` is set, and `zero_optimization.{name}.device` is "{device}", which moves one format'
            report.error(Code.COMBINATION, key, message, place_of(key), "leave out one of them")


def _refuse_optimizer(key: str, value: str, kind: str, report: Report, place_of: PlaceOf) -> None:
    message = f'`{key}` is {value} with optimizer type "{kind}", which updates all tensors at once in fp32'
    hint = "take an elementwise one, such as AdamW, Adam, SGD, Adagrad or Lion"
    report.error(Code.COMBINATION, key, message, place_of(key), hint)


def _masters_key(config: Training) -> str | None:
    """The key that asks for 16-bit masters; None where they are fp32."""
    if config.bf16.enabled and config.bf16.bf16_master_weights_and_grads:
        return _BF16_MASTERS
    return _FP16_MASTERS if config.fp16.enabled and config.fp16.fp16_master_weights_and_grads else None


def _autocast(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Autocast over a 16-bit model is for what it keeps in fp32; both in one format."""
    if not config.torch_autocast.enabled:
        return
    cast_to = (config.torch_autocast.dtype or "bfloat16").removeprefix("torch.")
    for name, section, format_of in (("fp16", config.fp16, "float16"), ("bf16", config.bf16, "bfloat16")):
        if section.enabled and cast_to != format_of:
            key = "torch_autocast.dtype"
            message = f'`{key}` is "{cast_to}", and `{name}.enabled` is true; expected "{format_of}", one format'
            hint = f'write "{format_of}", or leave out `{name}`: parameters are fp32 then, and autocast casts them'
            report.error(Code.COMBINATION, key, message, place_of(key), hint)


def _light_traffic(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Gradients of some modules travel in another format: not where all do, or go to the host as they come."""
    if not config.torch_autocast.enabled or not config.torch_autocast.lower_precision_safe_modules:
        return
    key, device = "torch_autocast.lower_precision_safe_modules", config.zero_optimization.offload_optimizer.device
    for name, section in (("fp16", config.fp16), ("bf16", config.bf16)):
        if section.enabled:
            message = f"`{key}` does nothing: `{name}.enabled` is true, and all gradients travel in 16 bits"
            report.warning(Code.NO_EFFECT, key, message, place_of(key), f"leave out `{key}`")
            return
    if config.communication_data_type is not None:
        other = f'`communication_data_type` is "{config.communication_data_type}"'
        message = f"`{key}` is set, and {other}, which is for all modules; expected one"
        report.error(Code.COMBINATION, key, message, place_of(key), "leave out one of them")
    if device != "none":
        message = (
            f'`{key}` is set, and `zero_optimization.offload_optimizer.device` is "{device}", which has one format'
        )
        report.error(Code.COMBINATION, key, message, place_of(key), "leave out one of them")


def _loss_scale(fp16: Fp16, report: Report, place_of: PlaceOf) -> None:
    """What a dynamic scale cannot work with; a fixed one reads none of these keys."""
    if not fp16.enabled or fp16.loss_scale > 0:
        return
    wrong = {
        "hysteresis": (fp16.hysteresis, fp16.hysteresis >= 1, "an integer >= 1"),
        "min_loss_scale": (fp16.min_loss_scale, fp16.min_loss_scale > 0, "a number > 0"),
        "initial_scale_power": (
            fp16.initial_scale_power,
            fp16.initial_scale_power <= _LARGEST_SCALE_POWER,
            f"an integer from 0 to {_LARGEST_SCALE_POWER}: the loss is multiplied in fp32",
        ),
    }
    for name, (value, is_right, expected) in wrong.items():
        if not is_right:
            key = f"fp16.{name}"
            message = f"`{key}` is {value:g} with a dynamic loss scale; expected {expected}"
            report.error(Code.COMBINATION, key, message, place_of(key), f"leave out `{key}`, or set `fp16.loss_scale`")


def _fp8(config: Training, report: Report, place_of: PlaceOf) -> None:
    """torchao's layers compute in bf16 around their products."""
    autocast = config.torch_autocast
    has_bf16 = config.bf16.enabled or (autocast.enabled and autocast.dtype in (None, "bfloat16", "torch.bfloat16"))
    if config.fp8.enabled and not has_bf16:
        key = "fp8.enabled"
        message = f"`{key}` is true without bf16; expected `bf16.enabled`, or `torch_autocast` with bfloat16"
        report.error(Code.COMBINATION, key, message, place_of(key), 'add "bf16": {"enabled": true}')
