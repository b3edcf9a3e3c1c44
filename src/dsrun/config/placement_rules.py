"""Which keys of the placement of optimizer states do nothing, for what is placed was decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.offload import OffloadPlacement
from dsrun.config.sections.training import Training
from dsrun.config.tree import Position

_SECTION = "zero_optimization.offload_placement"


def check_placement(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    """Warns of keys that nothing reads.

    Args:
        config: every key valid on its own.
        report: gets the findings.
        place_of: place of a dotted path.
    """
    optimizer = config.zero_optimization.offload_optimizer
    if optimizer.device != "none" and optimizer.ratio == "auto":
        return
    section = config.zero_optimization.offload_placement
    usual = OffloadPlacement.model_construct()
    for name in OffloadPlacement.model_fields:
        if getattr(section, name) != getattr(usual, name):
            key = f"{_SECTION}.{name}"
            why = "nothing leaves the GPU" if optimizer.device == "none" else "`ratio` says what stays"
            report.warning(
                Code.NO_EFFECT,
                key,
                f"`{key}` has no effect: {why}",
                place_of(key),
                'set `offload_optimizer.ratio` to "auto", or leave the key out',
            )
