"""What a run has done so far, put together from its records: its steps, each once, and what belongs to them.

Judges nothing. A step that was taken again after a failure counts as it was taken last, see [Note: records of a run] in
`dsrun.contract.step_records`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.step_records import (
    LOG_EVENT,
    SPREAD_EVENT,
    STEP_EVENT,
    LogRecord,
    SpreadRecord,
    StepRecord,
    read_log,
    read_spread,
    read_step,
)
from dsrun.contract.wait_records import WAITS_EVENT, WaitRecord, from_fields

from .follow import RecordFollower

#: Event with which rank 0 of each attempt begins.
START_EVENT = "start"


@dataclass(frozen=True, slots=True)
class Rewind:
    """Steps that were lost with an attempt, and taken again or given up.

    Attributes:
        step: Number of the first of them.
        steps: Number of steps.
        time: Seconds since the epoch at which the next attempt took its first step.
    """

    step: int
    steps: int
    time: float


@dataclass(slots=True)
class RunHistory:
    """Records of a job, those of all its attempts.

    Attributes:
        starts: Records with which attempts began, in order of time, as they were written.
        steps: Steps in order of their number, each as it was taken last.
        spreads: Comparisons of the ranks, in order of their step.
        waits: Waits of the ranks by collective, in order of their step.
        logs: Figures of the script, in order of their step.
        checkpoints: Records of saved checkpoints, in order of time, as they were written.
        rewinds: Steps that were lost with an attempt.
        engines: Number of engines that train in the process of rank 0; the records of the first one count.
        unread: Number of records of a known event that lack a field: those of another version.
    """

    starts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    spreads: list[SpreadRecord] = field(default_factory=list[SpreadRecord])
    waits: list[WaitRecord] = field(default_factory=list[WaitRecord])
    logs: list[LogRecord] = field(default_factory=list[LogRecord])
    checkpoints: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rewinds: list[Rewind] = field(default_factory=list[Rewind])
    engines: int = 1
    unread: int = 0

    @property
    def start(self) -> dict[str, Any] | None:
        """Record with which the newest attempt began; None before there is one."""
        return self.starts[-1] if self.starts else None

    def take(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes further records, in the order in which they were written."""
        for record in records:
            try:
                self._take(record)
            except (KeyError, TypeError):
                self.unread += 1

    def _take(self, record: Mapping[str, Any]) -> None:
        engine = record.get("engine", 0)
        if engine:
            # Of an actor and its critic, say: steps of both in one curve would be none's.
            self.engines = max(self.engines, engine + 1)
            return
        match record.get("event"):
            case event if event == START_EVENT:
                self.starts.append(dict(record))
            case event if event == STEP_EVENT:
                self._take_step(read_step(record))
            case event if event == SPREAD_EVENT:
                self.spreads.append(read_spread(record))
            case event if event == WAITS_EVENT:
                self.waits.append(from_fields(record))
            case event if event == LOG_EVENT:
                self.logs.append(read_log(record))
            case event if event == CHECKPOINT_EVENT:
                self.checkpoints.append(dict(record))
            case _:
                pass

    def _take_step(self, step: StepRecord) -> None:
        if self.steps and step.step <= self.steps[-1].step:
            first = bisect_left(self.steps, step.step, key=lambda each: each.step)
            self.rewinds.append(Rewind(step.step, len(self.steps) - first, step.time))
            del self.steps[first:]
            # What was told of steps that do not count any more.
            self.spreads = [each for each in self.spreads if each.step < step.step]
            self.waits = [each for each in self.waits if each.step < step.step]
            self.logs = [each for each in self.logs if each.step < step.step]
        self.steps.append(step)


class RunReader:
    """Keeps a run's history up to date with its records.

    Args:
        folder: Folder of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(JobPaths(folder).records)
        self.history = RunHistory()

    def read(self) -> RunHistory:
        """Reads what is new, and returns the history.

        Raises:
            OSError: the records cannot be read, but for records that do not exist yet.
        """
        self.history.take(self._follower.read())
        return self.history
