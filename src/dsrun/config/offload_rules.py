"""What the sections of offload must say together: a drive needs a folder on it."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.zero import ZeroOptimization
from dsrun.config.tree import Position


def check_offload(zero: ZeroOptimization, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports combinations.

    Args:
        zero: the section `zero_optimization`.
        report: gets the findings.
        place_of: place of a dotted path.
    """
    section = zero.offload_optimizer
    if section.device == "nvme" and not (section.nvme_path and all(section.nvme_path)):
        key = "zero_optimization.offload_optimizer.device"
        message = f'`{key}` is "nvme", and `nvme_path` beside it is not set; expected a folder on a local drive'
        report.error(
            Code.COMBINATION, key, message, place_of(key), "a list of folders on several drives is striped over"
        )
