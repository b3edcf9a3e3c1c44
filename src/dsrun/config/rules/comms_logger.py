"""Names of collectives in `comms_logger` that there are not, and names that nothing reads."""

from __future__ import annotations

from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.sections.observe import COLLECTIVES, CommsLogger
from dsrun.config.suggest import suggest_value
from dsrun.config.text.tree import Position

_KEY = "comms_logger.prof_ops"


def check_comms_logger(section: CommsLogger, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports names that are no collective, and names beside `prof_all`.

    Args:
        section: the section, every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
    """
    for name in section.prof_ops:
        if name not in COLLECTIVES:
            known = ", ".join(sorted(set(COLLECTIVES.values())))
            hint = suggest_value(name, tuple(COLLECTIVES)) or f"there are {known}, and DeepSpeed's names of them"
            report.error(Code.BAD_VALUE, _KEY, f'`{_KEY}` has "{name}", which is no collective', place_of(_KEY), hint)
    if section.enabled and section.prof_all and section.prof_ops:
        message = f"`{_KEY}` has no effect: `comms_logger.prof_all` counts all kinds"
        report.warning(
            Code.NO_EFFECT, _KEY, message, place_of(_KEY), "set `prof_all` to false, or leave out `prof_ops`"
        )
