"""Jobs as rows of a table and as JSON. Reads the clock it is given and nothing else."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ..console.status_area import cells, fit, plain
from .listing import Job

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_GAP = "  "
_HEADING = ("JOB", "STATE", "RANKS", "STEP", "AGE", "TOOK", "EXIT", "COMMAND")
#: What a narrow terminal does without, so that the command has these columns at least.
_SPARED = ("RANKS", "AGE", "EXIT", "STEP", "TOOK")
_LEAST_COMMAND = 18
#: Columns that a word of a command may take, the most that leave room for all words.
_MOST_WORD = range(48, 15, -4)


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
    return shlex.join(["dsrun", *_typed(job)])


def short_command(job: Job, columns: int) -> str:
    """Returns the command in so many columns, its script among them.

    Long words lose their middle; if that is not enough, `…` stands for all before the script's own name; then the end
    is cut off.
    """
    typed = _typed(job)
    program: dict[str, Any] = job.record.plan.get("program") or {}
    # A command of the working folder is run as `./name`.
    names = {target := str(program.get("target", "")), target.removeprefix("./")}
    at = next((number for number, word in enumerate(typed) if word in names), None)
    whole = ["dsrun", *map(_shown, typed)]
    forms = [whole, *([_without_middle(word, most) for word in whole] for most in _MOST_WORD)]
    if at is not None:
        folder, name = os.path.split(typed[at])
        rest = [f"…/{_shown(name)}" if folder else _shown(name), *map(_shown, typed[at + 1 :])]
        folded = rest if folder else ["…", *rest]
        forms += [folded, *([_without_middle(word, most) for word in folded] for most in _MOST_WORD)]
    texts = [" ".join(form) for form in forms]
    return next((text for text in texts if cells(text) <= columns), fit(texts[-1], columns))


def _shown(word: str) -> str:
    return plain(shlex.quote(word))


def _typed(job: Job) -> tuple[str, ...]:
    words = job.record.command
    return words[1:] if words[:1] == ("run",) else words


def _without_middle(text: str, columns: int) -> str:
    """Returns text of at most so many columns; more of its end is kept, where a path has its name."""
    if cells(text) <= columns:
        return text
    first = fit(text, columns // 3)
    last = len(text)
    while cells(text[last - 1 :]) <= columns - cells(first):
        last -= 1
    return first + text[last:]


def took_s(job: Job, now: datetime) -> float | None:
    """Returns how long the job ran, or has run up to now; None where nobody knows, or no rank of it has run."""
    if job.never_ran or job.record.started is None or (job.ended is None and not job.state.is_live):
        return None
    return ((job.ended or now) - job.record.started).total_seconds()


def state_text(job: Job) -> str:
    """Returns how a job is, in words; one that ended without a rank is told from one that ran."""
    return f"{job.state.value} before it started" if job.never_ran else job.state.value


def job_json(job: Job, *, step: int | None, now: datetime) -> dict[str, Any]:
    """Returns what programs get to know of a job in a list.

    Args:
        job: job to describe.
        step: newest optimizer step that a rank of the job has finished; None where no rank told of any.
        now: present time, for the duration of a job that runs.
    """
    took = took_s(job, now)
    body = job.record.to_json()
    kept = ("created", "started", "command", "cwd", "user", "host", "detached", "ranks", "hosts")
    return {
        "id": job.id,
        "state": job.state.value,
        "never_ran": job.never_ran,
        **{name: body[name] for name in kept},
        "step": step,
        "ended": None if job.ended is None else job.ended.isoformat(timespec="milliseconds"),
        "duration_s": None if took is None else round(took, 3),
        "exit_code": job.exit_code,
        "folder": str(job.folder),
    }


def job_table(jobs: Sequence[tuple[Job, int | None]], *, now: datetime, columns: int | None = None) -> list[str]:
    """Returns a heading and a line for each job.

    Args:
        jobs: each with the step it has come to.
        now: present time, for the ages and durations of jobs.
        columns: width of the terminal in columns, which no line exceeds; None shows everything whole.
    """
    rows: list[tuple[str, ...]] = []
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
            )
        )
    kept = list(range(len(_HEADING) - 1))
    for name in _SPARED:
        if columns is not None and _width([_HEADING, *rows], kept) + _LEAST_COMMAND > columns:
            kept.remove(_HEADING.index(name))
    room = None if columns is None else max(1, columns - _width([_HEADING, *rows], kept))
    commands = [plain(command_text(job)) if room is None else short_command(job, room) for job, _ in jobs]
    lines = align(
        [
            (*(row[at] for at in kept), last)
            for row, last in zip([_HEADING[:-1], *rows], [_HEADING[-1], *commands], strict=True)
        ]
    )
    return lines if columns is None else [fit(line, columns) for line in lines]


def _width(rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    """Returns where the column after these ones begins."""
    return sum(max(cells(row[at]) for row in rows) + len(_GAP) for at in kept)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with columns as wide as they must be; the last column ends where it ends."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def terminal_columns(descriptor: int = 1) -> int | None:
    """Returns the width that a table may have: a terminal's, for lines that wrap cannot be read; None elsewhere."""
    return shutil.get_terminal_size().columns if os.isatty(descriptor) else None


def fit_terminal(lines: Sequence[str], descriptor: int = 1) -> list[str]:
    """Cuts lines to the width of the terminal, where there is one."""
    columns = terminal_columns(descriptor)
    return list(lines) if columns is None else [fit(line, columns) for line in lines]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
