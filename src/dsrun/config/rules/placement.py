"""What of the placement of optimizer states does nothing, for it was decided elsewhere, and what cannot be moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dsrun.config.findings import Code, Report
from dsrun.config.sections.offload import OffloadPlacement
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position

_SECTION = "zero_optimization.offload_placement"


def check_placement(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports keys that nothing reads, and states that cannot move between tiers.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
    """
    optimizer = config.zero_optimization.offload_optimizer
    section = config.zero_optimization.offload_placement
    if optimizer.device != "none" and optimizer.ratio == "auto":
        if section.remeasure_after is not None:
            _refuse_what_stays_where_it_is(config, report, place_of)
        return
    usual = OffloadPlacement.model_construct()
    for name in OffloadPlacement.model_fields:
        if getattr(section, name) != getattr(usual, name):
            key = f"{_SECTION}.{name}"
            reason = "nothing leaves the GPU" if optimizer.device == "none" else "`ratio` says what stays"
            report.warning(
                Code.NO_EFFECT,
                key,
                f"`{key}` has no effect: {reason}",
                place_of(key),
                'set `offload_optimizer.ratio` to "auto", or leave the key out',
            )


def _refuse_what_stays_where_it_is(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    key = f"{_SECTION}.remeasure_after"
    for what in _immovable(config):
        report.error(
            Code.COMBINATION,
            key,
            f"`{key}` is set, and {what}",
            place_of(key),
            "leave it out: a checkpoint of this run loads under any other placement",
        )


def _immovable(config: Training) -> Iterator[str]:
    zero = config.zero_optimization
    optimizer = zero.offload_optimizer
    if optimizer.device == "nvme":
        yield "`offload_optimizer.device` is nvme: states have their places on a drive for the whole run"
    if zero.offload_param.device != "none":
        yield "`offload_param` keeps parameters off the GPU, whose masters do not come there in a run"
    if optimizer.super_offload:
        yield "`offload_optimizer.super_offload` keeps a second set of states in host memory for the whole run"
    if optimizer.state_format != "fp32":
        yield f"`offload_optimizer.state_format` is {optimizer.state_format}: states on the GPU lie in fp32"
    if optimizer.split_master:
        yield "`offload_optimizer.split_master` keeps masters as halves in host memory for the whole run"
