"""What no single key can say: combinations that are impossible, do nothing, or differ from DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.rules.activation import clashes
from dsrun.config.rules.comms_logger import check_comms_logger
from dsrun.config.rules.host_step import check_host_step
from dsrun.config.rules.idle_offload import check_idle_offload
from dsrun.config.rules.offload import check_offload
from dsrun.config.rules.optimizer import check_optimizer, check_scheduler
from dsrun.config.rules.pipeline import check_pipeline
from dsrun.config.rules.placement import check_placement
from dsrun.config.rules.precision import check_precision
from dsrun.config.rules.tensor import check_tensor
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position

#: Place of a key, or of the closest thing around it that was written.
PlaceOf = Callable[[str], Position]
#: Whether a key was written.
IsGiven = Callable[[str], bool]


def check_rules(config: Training, report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    """Reports combinations.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    check_precision(config, report, place_of)
    check_host_step(config, report, place_of)
    _clipping(report, place_of, is_given)
    _sums_over_ranks(config, report, place_of)
    _activations(config, report, place_of)
    check_offload(config, report, place_of)
    check_idle_offload(config, report, place_of, is_given)
    check_placement(config, report, place_of)
    check_pipeline(config, report, place_of, is_given)
    check_tensor(config, report, place_of)
    check_comms_logger(config.comms_logger, report, place_of)
    if config.optimizer is not None:
        check_optimizer(config.optimizer, report, place_of, is_given)
    if config.scheduler is not None:
        check_scheduler(config.scheduler, config.optimizer, report, place_of, is_given)


def _activations(config: Training, report: Report, place_of: PlaceOf) -> None:
    for clash in clashes(config.activation_checkpointing, tensor_parallel=config.tensor_parallel.size > 1):
        report.error(Code.COMBINATION, clash.key, clash.message, place_of(clash.key), clash.hint)


def _clipping(report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    if not is_given("gradient_clipping"):
        message = "`gradient_clipping` is not set; gradients are clipped at norm 1.0, as in DeepSpeed since 0.19"
        hint = 'write "gradient_clipping": 0 to train without, as DeepSpeed did before'
        report.note(Code.DIFFERENT_DEFAULT, "gradient_clipping", message, place_of(""), hint)


def _sums_over_ranks(config: Training, report: Report, place_of: PlaceOf) -> None:
    """Sums are divided by nothing, so no part of the division can come first."""
    if config.gradient_allreduce_op != "sum":
        return
    for name, asks in (
        ("prescale_gradients", config.prescale_gradients),
        ("gradient_predivide_factor", config.gradient_predivide_factor != 1),
    ):
        if asks:
            message = f'`{name}` does nothing: `gradient_allreduce_op` is "sum", and nothing is divided'
            report.warning(Code.NO_EFFECT, name, message, place_of(name), "leave out one of them")
