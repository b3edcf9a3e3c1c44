"""Jobs as rows of a table and as JSON. Reads the clock it is given and nothing else."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from .job_list import Job

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_GAP = "  "


def short_duration(seconds: float) -> str:
    """`42` -> `42s`, `754` -> `12m`, `11045` -> `3h04m`, `200000` -> `2d07h`: two units at most, for a column."""
    whole = max(0, int(seconds))
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h{whole % _HOUR_S // _MINUTE_S:02}m"
    return f"{whole // _DAY_S}d{whole % _DAY_S // _HOUR_S:02}h"


def command_text(job: Job) -> str:
    """Returns the command as one would type it, short of secrets."""
    words = job.record.command
    return shlex.join(["dsrun", *(words[1:] if words[:1] == ("run",) else words)])


def took_s(job: Job, now: datetime) -> float | None:
    """Returns how long the job ran, or has run up to now; None where nobody knows, or it has not begun."""
    if job.record.started is None or (job.ended is None and not job.state.is_live):
        return None
    return ((job.ended or now) - job.record.started).total_seconds()


def job_json(job: Job, *, step: int | None, now: datetime) -> dict[str, Any]:
    """Returns what programs get to know of a job in a list.

    Args:
        job: which one.
        step: how far it has come.
        now: for a running job's duration.
    """
    took = took_s(job, now)
    body = job.record.to_json()
    kept = ("created", "started", "command", "cwd", "user", "host", "detached", "ranks", "hosts")
    return {
        "id": job.id,
        "state": job.state.value,
        **{name: body[name] for name in kept},
        "step": step,
        "ended": None if job.ended is None else job.ended.isoformat(timespec="milliseconds"),
        "duration_s": None if took is None else round(took, 3),
        "exit_code": job.exit_code,
        "folder": str(job.folder),
    }


def job_table(jobs: Sequence[tuple[Job, int | None]], *, now: datetime) -> list[str]:
    """Returns a heading and a line for each job.

    Args:
        jobs: each with the step it has come to.
        now: for ages.
    """
    rows = [("JOB", "STATE", "RANKS", "STEP", "AGE", "TOOK", "EXIT", "COMMAND")]
    for job, step in jobs:
        took = took_s(job, now)
        rows.append(
            (
                job.id,
                job.state.value,
                str(job.record.ranks),
                _or_dash(step),
                short_duration((now - job.record.created).total_seconds()),
                "-" if took is None else short_duration(took),
                _or_dash(job.exit_code),
                command_text(job),
            )
        )
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with columns as wide as they must be; the last column ends where it ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def fit_terminal(lines: Sequence[str], descriptor: int = 1) -> list[str]:
    """Cuts lines to the width of the terminal, where there is one: a table whose lines wrap cannot be read."""
    if not os.isatty(descriptor):
        return list(lines)
    width = shutil.get_terminal_size().columns
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
