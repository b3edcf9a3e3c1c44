"""Showing the log of a job that another `dsrun` runs or ran: as tagged lines or as JSON, up to now or to its end.

What is read stands in `logs/reader.py`, how a line looks in `console/printer.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dsrun.errors import UsageError

from ..console.printer import PatientStream, Printer, wants_colour
from ..console.rank_set import parse_rank_set
from ..jobs.front_end_process import FrontEndProcess
from ..jobs.listing import Job
from ..jobs.lock import is_locked
from ..logs.reader import LogLines, read_lines
from ..options.types import parse_seconds_or_none

#: Between two looks for new lines.
LOOK_S = 0.2


class LogView:
    """Shows the lines of one job.

    Args:
        job: job that wrote the lines.
        ranks: ranks to show the lines of, as `0,8-11`; None for all.
        as_json: one JSON object a line instead of tagged lines.
        split: whether lines of ranks' stderr go to stderr, as when the job runs in the foreground; else all lines go to
            stdout.

    Raises:
        UsageError: the job has no such rank.
    """

    def __init__(self, job: Job, *, ranks: str | None = None, as_json: bool = False, split: bool = False) -> None:
        self._folder = job.folder
        self._ranks = None if ranks is None else parse_rank_set(ranks, job.record.ranks)
        self._as_json = as_json
        self._split = split
        err = 2 if split else 1
        #: The reader of what is shown went away.
        self.is_closed = False
        self._stdout = PatientStream(1, lambda: True)
        self._printer = Printer(
            stdout=self._stdout,
            stderr=PatientStream(err, lambda: True),
            stdout_colour=wants_colour(os.environ, is_terminal=os.isatty(1)),
            stderr_colour=wants_colour(os.environ, is_terminal=os.isatty(err)),
            hosts=hosts_by_rank(job),
            on_closed=self._on_closed,
        )

    def show(
        self,
        *,
        since_s: float | None = None,
        grep: re.Pattern[str] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> None:
        """Shows what there is, and what comes. The arguments are those of `read_log`.

        Raises:
            BrokenPipeError: nobody reads any more.
            OSError: what is shown cannot be written, to a full disk for example.
        """

        def goes_on() -> bool:
            return follow is not None and follow() and not self.is_closed

        reading = None if follow is None else goes_on
        for lines in read_lines(self._folder, ranks=self._ranks, since_s=since_s, grep=grep, follow=reading):
            self._show(lines)
            if self.is_closed:
                raise BrokenPipeError
            if self._printer.fault is not None:
                raise self._printer.fault

    def note(self, text: str) -> None:
        """Says something about the job."""
        self._printer.note(text)

    def report(self, lines: list[str]) -> None:
        """Says why the job failed."""
        self._printer.report(lines)

    def _show(self, lines: LogLines) -> None:
        if self._as_json:
            self._show_json(lines)
        elif lines.rank is None:
            for text in lines.texts:
                self._printer.note(text)
        else:
            self._printer.lines(
                lines.rank, "stderr" if self._split and lines.stream == "stderr" else "stdout", lines.texts
            )

    def _show_json(self, lines: LogLines) -> None:
        head: dict[str, Any] = {"time": round(lines.time_s, 6), "rank": lines.rank, "stream": lines.stream}
        data = "".join([json.dumps({**head, "text": text}) + "\n" for text in lines.texts]).encode("ascii")
        while data:
            data = data[self._stdout.write(data) :]

    def _on_closed(self) -> None:
        self.is_closed = True


def until_its_end(job: Job, front_end: FrontEndProcess | None) -> Callable[[], bool]:
    """Returns what waits a moment and says whether the job goes on.

    Args:
        job: job to wait for.
        front_end: its process; None for one of another host, whose lock is looked at instead.
    """
    if front_end is not None:
        return lambda: not front_end.wait(LOOK_S)
    nobody = FrontEndProcess(None)

    def locked() -> bool:
        nobody.wait(LOOK_S)
        return is_locked(job.folder)

    return locked


def hosts_by_rank(job: Job) -> list[str]:
    """Returns the host of each rank, as far as the plan tells."""
    nodes: list[dict[str, Any]] = job.record.plan.get("nodes") or []
    try:
        hosts = [str(node["host"]["name"]) for node in nodes for _ in node["workers"]]
    except (KeyError, TypeError):
        # A plan of another version, see `JobRecord.plan`.
        hosts = []
    return hosts if len(hosts) == job.record.ranks else [job.record.hosts[0]] * job.record.ranks


def parse_since(text: str, now: datetime) -> float:
    """Reads a time ago (`5m`, `2h`) or a time (`14:30`, `2026-11-21T14:30`).

    Args:
        text: time as the user gave it to `--since`.
        now: current local time, with its time zone.

    Returns:
        seconds since the epoch.

    Raises:
        UsageError: it is neither.
    """
    ago_s = parse_seconds_or_none(text)
    if ago_s is not None:
        return now.timestamp() - ago_s
    clock = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?", text)
    try:
        if clock is not None:
            hour, minute, second = (int(part or 0) for part in clock.groups())
            return now.replace(hour=hour, minute=minute, second=second, microsecond=0).timestamp()
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"`--since {text}`: expected a time ago or a time", hint="`5m`, `2h`, `14:30` or `2026-11-21T14:30`"
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)).timestamp()
