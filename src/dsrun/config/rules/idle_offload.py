"""Keys of offload that nothing reads beside the others, folders named twice, and what stays where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from dsrun.config.findings import Code, Report
from dsrun.config.knob import Section
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position

PlaceOf = Callable[[str], Position]
IsGiven = Callable[[str], bool]

_ZERO = "zero_optimization"
#: Keys that only what streams from a drive reads.
_OF_DRIVES = {
    "offload_optimizer": ("buffer_count", "fast_init", "pipeline_read", "pipeline_write"),
    "offload_param": ("buffer_count", "max_in_cpu"),
}
_WHERE = {"none": "everything stays on the GPU", "cpu": "everything lies in host memory"}


def check_idle_offload(config: Training, report: Report, place_of: PlaceOf, is_given: IsGiven) -> None:
    """Reports keys that do nothing, and folders that are no two drives.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    zero = config.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        path = f"{_ZERO}.{name}.nvme_path"
        if section.device != "nvme":
            _without_a_drive(name, section, section.device, report, place_of, is_given)
        elif section.nvme_path:
            _folders(path, section.nvme_path, report, place_of)
    uses_drive = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    asks = any(is_given(f"aio.{key}") for key in type(config.aio).model_fields)
    if asks and not uses_drive and not config.activation_checkpointing.nvme_path:
        message = "`aio` is set, and nothing goes to a drive: no `device` is nvme, and activations have no `nvme_path`"
        report.warning(Code.NO_EFFECT, "aio", message, place_of("aio"), "leave it out, or offload something to nvme")
    _masters_that_stay(config, report, place_of)


def _without_a_drive(
    name: str, section: Section, device: str, report: Report, place_of: PlaceOf, is_given: IsGiven
) -> None:
    """Keys for a drive where there is none; of a section that is off, its path alone, as elsewhere."""
    keys = ("nvme_path", *(_OF_DRIVES[name] if device != "none" else ()))
    for key in keys:
        path = f"{_ZERO}.{name}.{key}"
        value = getattr(section, key)
        if not is_given(path) or value == type(section).model_fields[key].default:
            continue
        message = f"`{path}` has no effect: `device` beside it is {device}, so {_WHERE[device]}"
        hint = "set `device` to nvme, or leave it out"
        report.warning(Code.NO_EFFECT, path, message, place_of(path), hint)


def _folders(path: str, folders: Sequence[str], report: Report, place_of: PlaceOf) -> None:
    seen: dict[str, str] = {}
    for folder in filter(None, folders):
        plain = os.path.normpath(folder)
        if plain in seen:
            message = f"`{path}` names {plain} twice; each rank would have two files there, and no drive more"
            report.error(Code.COMBINATION, path, message, place_of(path), "name one folder on each drive")
            return
        seen[plain] = folder


def _masters_that_stay(config: Training, report: Report, place_of: PlaceOf) -> None:
    """In one format an optimizer on the GPU updates the very parameters, which have to be there."""
    zero = config.zero_optimization
    is_narrow = config.bf16.enabled or config.fp16.enabled
    device = zero.offload_param.device
    if zero.stage != 3 or device == "none" or zero.offload_optimizer.device != "none" or is_narrow:
        return
    key = f"{_ZERO}.offload_param.device"
    place = "the drive" if device == "nvme" else "host memory"
    message = (
        f"`{key}` is {device} in fp32 training with the optimizer on the GPU, which updates the trained parameters "
        f"themselves: they stay there, and only frozen ones go to {place}"
    )
    hint = "use bf16, or set `offload_optimizer.device` too; for an engine without an optimizer all of them go"
    report.warning(Code.COMBINATION, key, message, place_of(key), hint)
