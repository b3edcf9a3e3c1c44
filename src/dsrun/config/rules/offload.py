"""What the sections of offload must say together: a drive needs a folder on it, and masters a place of their own."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position


def check_offload(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports combinations.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
    """
    zero = config.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section.device == "nvme" and not (section.nvme_path and all(section.nvme_path)):
            key = f"zero_optimization.{name}.device"
            message = f'`{key}` is "nvme", and `nvme_path` beside it is not set; expected a folder on a local drive'
            report.error(
                Code.COMBINATION, key, message, place_of(key), "a list of folders on several drives is striped over"
            )
    ahead = "zero_optimization.offload_optimizer.super_offload"
    if zero.offload_optimizer.super_offload and zero.offload_optimizer.device == "nvme":
        message = (
            f'`{ahead}` is true and `device` beside it is "nvme": a step that may not count would be written to the '
            "drive all the same, beside the masters and states that it began with"
        )
        report.error(Code.COMBINATION, ahead, message, place_of(ahead), "leave it out, or set `device` to cpu")
    is_narrow = config.bf16.enabled or config.fp16.enabled
    if (
        zero.stage == 3
        and zero.offload_param.device == "nvme"
        and zero.offload_optimizer.device == "cpu"
        and not is_narrow
    ):
        key = "zero_optimization.offload_param.device"
        message = (
            f'`{key}` is "nvme" in fp32 training with the optimizer in host memory, where parameters are the masters'
        )
        report.error(
            Code.COMBINATION, key, message, place_of(key), "set `offload_optimizer.device` to nvme too, or use bf16"
        )
