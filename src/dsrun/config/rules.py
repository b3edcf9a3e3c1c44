"""What no single key can say: combinations that are impossible, do nothing, or differ from DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.activation_rules import clashes
from dsrun.config.findings import Code, Report
from dsrun.config.optimizer_rules import check_optimizer, check_scheduler
from dsrun.config.sections.optimizer_params import AdamParams, SgdParams
from dsrun.config.sections.precision import Fp16
from dsrun.config.sections.training import Training
from dsrun.config.tree import Position

#: 2 to this power is the largest fp32 number that is a power of 2.
_LARGEST_SCALE_POWER = 127

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
    _pure_bf16(config, report, place_of)
    _autocast(config, report, place_of)
    _loss_scale(config.fp16, report, place_of)
    _clipping(report, place_of, is_given)
    _activations(config, report, place_of)
    if config.optimizer is not None:
        check_optimizer(config.optimizer, report, place_of, is_given)
    if config.scheduler is not None:
        check_scheduler(config.scheduler, config.optimizer, report, place_of, is_given)


def _one_precision(config: Training, report: Report, place_of: PlaceOf) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        message = "`fp16.enabled` and `bf16.enabled` are both true; expected one"
        report.error(
            Code.COMBINATION, "fp16.enabled", message, place_of("fp16.enabled"), "keep bf16 where the GPU has it"
        )


def _pure_bf16(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Masters and states are in one format: states in fp32 over bf16 masters are those of an optimizer on the CPU."""
    bf16 = config.bf16
    if not bf16.enabled or not (bf16.bf16_master_weights_and_grads or bf16.bf16_optimizer_states):
        return
    first, second = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    if not (bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states):
        given, missing = (first, second) if bf16.bf16_master_weights_and_grads else (second, first)
        message = f"`{given}` is true and `{missing}` is not; expected both: masters and states are in one format"
        report.error(Code.COMBINATION, given, message, place_of(given), f"set `{missing}`, or leave both out")
    elif config.optimizer is not None and not isinstance(config.optimizer.params, (AdamParams, SgdParams)):
        message = f'`{first}` is true with optimizer type "{config.optimizer.type}", which keeps fp32; '
        message += "expected Adam, AdamW or SGD"
        report.error(Code.COMBINATION, first, message, place_of(first))
    if bf16.bf16_master_weights_and_grads and config.data_types.grad_accum_dtype == "fp32":
        key = "data_types.grad_accum_dtype"
        message = f'`{key}` is "fp32", and `{first}` is true, which adds gradients up in bf16'
        report.error(Code.COMBINATION, key, message, place_of(key), "leave out one of them")


def _autocast(config: Training, report: Report, place_of: PlaceOf) -> None:
    for name, section in (("fp16", config.fp16), ("bf16", config.bf16)):
        if config.torch_autocast.enabled and section.enabled:
            key = "torch_autocast.enabled"
            message = f"`{key}` and `{name}.enabled` are both true; autocast casts parameters in fp32, expected one"
            report.error(Code.COMBINATION, key, message, place_of(key), f"keep `{name}`: it takes half the memory")


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


def _activations(config: Training, report: Report, place_of: PlaceOf) -> None:
    tensor_parallel = max(config.tensor_parallel.autotp_size, config.tensor_parallel.tp.tp_size) > 1
    for clash in clashes(config.activation_checkpointing, tensor_parallel=tensor_parallel):
        report.error(Code.COMBINATION, clash.key, clash.message, place_of(clash.key), clash.hint)


def _clipping(report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    if not is_given("gradient_clipping"):
        message = "`gradient_clipping` is not set; gradients are clipped at norm 1.0, as in DeepSpeed since 0.19"
        hint = 'write "gradient_clipping": 0 to train without, as DeepSpeed did before'
        report.note(Code.DIFFERENT_DEFAULT, "gradient_clipping", message, place_of(""), hint)
