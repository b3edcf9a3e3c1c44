"""What a config comes to outside of training, said once for the whole job and written into its records.

That is what became of one that a program made, and which trackers it switches on. A rank gives nothing to a tracker:
one that is down or slow would stall it. Changes no config.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from dsrun.config.config import Config
from dsrun.config.monitors import enabled_monitors
from dsrun.contract.environment import RankInfo, stands_for_deepspeed
from dsrun.contract.monitor_records import MONITORS_EVENT, monitors_fields

from ...observe.records import RecordWriter

#: Event of what became of a program's config. Field: `notes`, a line for each.
CONFIG_NOTES_EVENT = "config_notes"


def tell_program_config(settings: Config, info: RankInfo) -> None:
    """Says each finding about a dict that a program made for DeepSpeed, a line each; a file was checked at the launch.

    A job of several engines mostly gives all of them the same config: each line is said once in a process.

    Args:
        settings: the checked config.
        info: this process's place in the job; the first rank speaks.
    """
    if info.rank == 0:
        for line in program_notes(settings):
            _print_once(f"dsrun: config: {line}")


def record_program_config(settings: Config, records: RecordWriter) -> None:
    """Writes the same into the records of the job, once for each engine.

    Args:
        settings: the checked config.
        records: writer of records, which only the first rank has.
    """
    notes = program_notes(settings)
    if notes:
        records.write(CONFIG_NOTES_EVENT, {"notes": notes})


def program_notes(settings: Config) -> Sequence[str]:
    """Returns a line for each finding about a config that a program made; none for any other config.

    Args:
        settings: the checked config.
    """
    if not (stands_for_deepspeed() and settings.source == "<dict>"):
        return []
    return [finding.message + (f" ({finding.hint})" if finding.hint else "") for finding in settings.findings]


def record_monitors(settings: Config, records: RecordWriter, *, is_recorded: bool) -> None:
    """Writes down the trackers that the config switches on, without secrets; says so where nobody will read it.

    Args:
        settings: the checked config.
        records: writer of records, which only the first rank has.
        is_recorded: whether the run has records: a launcher of another kind makes none.
    """
    monitors = enabled_monitors(settings)
    if not monitors:
        return
    if is_recorded:
        records.write(MONITORS_EVENT, monitors_fields(monitors))
        return
    names = ", ".join(f"`{each.name}`" for each in monitors)
    _print_once(
        f"dsrun: {names} of this config get{'s' if len(monitors) == 1 else ''} nothing: trackers are fed by dsrun's "
        "launcher, and this job was not started by it; start it with `dsrun SCRIPT`"
    )


@functools.cache
def _print_once(line: str) -> None:
    print(line, flush=True)
