"""Records of a run as columns of numbers: those of a million steps fit in memory. Judges nothing.

As objects they would take a kilobyte or two a step; a figure of a column is 8 bytes. A step that was taken again after
a failure counts as it was taken last, see [Note: records of a run] in `dsrun.contract.step_records`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.step_records import (
    LOG_EVENT,
    SPREAD_EVENT,
    STEP_EVENT,
    StepRecord,
    StepSpread,
    read_log,
    read_spread,
)
from dsrun.contract.wait_records import WAITS_EVENT, WaitRecord, from_fields

from .follow import START_EVENT, RecordFollower, is_date

#: Stands for what is not known.
NAN = math.nan
_REQUIRED = ("step", "seconds", "samples", "lr", "applied")
#: Fields of a step that hold one number, and those that hold one by name.
_BY_NAME = ("memory", "phases", "traffic")
_NUMBERS = frozenset(each.name for each in fields(StepRecord)) - {*_BY_NAME, "lrs", "non_finite"}
_NUMBER_TYPES = (float, int)
_EMPTY: Mapping[str, float] = {}
#: Figures of a script that are kept, by name: a script that makes up names as it runs would fill a page with them.
_MOST_FIGURES = 200


class Columns:
    """Rows of numbers, kept by column; a column may lack any of them, and holds NaN there."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, row: Mapping[str, float]) -> None:
        """Appends a row.

        Raises:
            OverflowError: A number is too large for a float; nothing was appended.
        """
        columns, count = self._columns, self._count
        try:
            for name, value in row.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = array("d")
                if len(column) != count:
                    column.extend((NAN,) * (count - len(column)))
                column.append(value)
        except OverflowError:
            self.cut(count)
            raise
        self._count += 1

    def cut(self, first: int) -> None:
        """Removes a row and all behind it.

        Args:
            first: Index of the row.
        """
        for column in self._columns.values():
            del column[first:]
        self._count = min(self._count, first)

    def __getitem__(self, name: str) -> Sequence[float]:
        """Returns a column with a number for each row; all NaN where no row has one."""
        column = self._columns.get(name, array("d"))
        return column + array("d", (NAN,) * (self._count - len(column)))

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of columns that begin so and have a number, in order of their first."""
        return [name for name in self._columns if name.startswith(prefix) and self.has(name)]

    def has(self, name: str) -> bool:
        """Returns whether a column has any number."""
        return any(value == value for value in self._columns.get(name, ()))

    def last_at(self, name: str, value: float) -> int:
        """Returns the index of the first row whose number in a rising column is not below a value."""
        return bisect_left(self._columns.get(name, ()), value)


@dataclass(frozen=True, slots=True)
class Rewind:
    """Steps that were lost with an attempt, and taken again or given up.

    Attributes:
        step: Number of the first of them.
        steps: Number of steps.
        time: Time at which the next attempt took its first step, seconds since the epoch.
    """

    step: int
    steps: int
    time: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between the last step that counts and the first of the next attempt.

    Attributes:
        step: Number of that first step.
        kept_time: Time at the end of the one, seconds since the epoch; NaN where no step was kept.
        seconds: Seconds from there, or from the first start, to the end of the other.
    """

    step: int
    kept_time: float
    seconds: float


@dataclass(slots=True)
class RecordedRun:
    """Records of a job, those of all its attempts.

    Attributes:
        starts: Records with which attempts began, in order of time.
        steps: Steps in order of their number: fields of `StepRecord`, and `phases.forward` and the like.
        spreads: Means of comparisons of the ranks: `step`, and `forward.least`, `.median`, `.most`, `.most_rank`;
            `memory.gpu.most` and the like are bytes.
        waits: Waits by rank: `step`, `time`, `step_s`, and seconds a step by the rank's number.
        last_waits: Newest record of waits; None where there is none.
        figures: The script's figures by name, each with `step` and `value`.
        checkpoints: Records of saved checkpoints, in order of time.
        rewinds: Steps that were lost with an attempt.
        gaps: Time that restarts took.
        engines: Number of engines that train in the process of rank 0; the records of the first one count.
        unread: Number of records of a known event that lack a field or have one of another kind.
        dropped_figures: Number of names of figures beyond those that are kept.
    """

    starts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    steps: Columns = field(default_factory=Columns)
    spreads: Columns = field(default_factory=Columns)
    waits: Columns = field(default_factory=Columns)
    last_waits: WaitRecord | None = None
    figures: dict[str, Columns] = field(default_factory=dict[str, Columns])
    checkpoints: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rewinds: list[Rewind] = field(default_factory=list[Rewind])
    gaps: list[Gap] = field(default_factory=list[Gap])
    engines: int = 1
    unread: int = 0
    dropped_figures: int = 0
    _last_step: int = 0
    _is_first_of_attempt: bool = False
    _dropped: set[str] = field(default_factory=set[str])

    def take(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes further records, in the order in which they were written."""
        for record in records:
            try:
                self._take(record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self.unread += 1
        self.dropped_figures = len(self._dropped)

    def _take(self, record: Mapping[str, Any]) -> None:
        engine = record.get("engine", 0)
        if engine:
            self.engines = max(self.engines, engine + 1)
            return
        match record.get("event"):
            case event if event == STEP_EVENT:
                self._take_step(record)
            case event if event == SPREAD_EVENT:
                self._take_spread(record)
            case event if event == WAITS_EVENT:
                self._take_waits(record)
            case event if event == LOG_EVENT:
                self._take_figures(record)
            case event if event == CHECKPOINT_EVENT:
                self.checkpoints.append({**record, "time": _time_s(record)})
            case event if event == START_EVENT:
                self.starts.append({**record, "time": _time_s(record)})
                self._is_first_of_attempt = len(self.starts) > 1
            case _:
                pass

    def _take_step(self, record: Mapping[str, Any]) -> None:
        # Without a `StepRecord` in between, which would take longer than all the rest: a page is made in seconds.
        for name in _REQUIRED:
            if not math.isfinite(record[name]):
                raise ValueError(name)
        _time_s(record)
        row: dict[str, float] = {
            name: value for name, value in record.items() if type(value) in _NUMBER_TYPES and name in _NUMBERS
        }
        row["applied"] = float(record["applied"])
        for name in _BY_NAME:
            for key, value in record.get(name, _EMPTY).items():
                row[f"{name}.{key}"] = float(value)
        step = int(record["step"])
        if step <= self._last_step and len(self.steps):
            self._rewind(step, record["time"])
        if self._is_first_of_attempt:
            kept_time = self.steps["time"][-1] if len(self.steps) else NAN
            since_s = kept_time if len(self.steps) else self.starts[0]["time"]
            self.gaps.append(Gap(step, kept_time, record["time"] - since_s))
        self._is_first_of_attempt = False
        self._last_step = step
        self.steps.append(row)

    def _rewind(self, step: int, time_s: float) -> None:
        first = self.steps.last_at("step", step)
        self.rewinds.append(Rewind(step, len(self.steps) - first, time_s))
        for columns in (self.steps, self.spreads, self.waits, *self.figures.values()):
            columns.cut(columns.last_at("step", step))
        if self.last_waits is not None and self.last_waits.step >= step:
            self.last_waits = None

    def _take_spread(self, record: Mapping[str, Any]) -> None:
        spread = read_spread(record)
        row = {"step": float(spread.step), "ranks": float(spread.ranks)}
        for name, each in spread.seconds.items():
            row |= _mean_of(name, each)
        for tier, each in spread.memory.items():
            row |= _mean_of(f"memory.{tier}", each)
        self.spreads.append(row)

    def _take_waits(self, record: Mapping[str, Any]) -> None:
        waits = from_fields(record)
        self.last_waits = waits
        if waits.waited_s:
            by_rank = {str(rank): float(seconds) for rank, seconds in waits.waited_s.items()}
            about = {"step": float(waits.step), "time": _time_s(record), "step_s": float(waits.step_s)}
            self.waits.append(about | by_rank)

    def _take_figures(self, record: Mapping[str, Any]) -> None:
        log = read_log(record)
        for name, value in log.values.items():
            if name not in self.figures:
                if len(self.figures) >= _MOST_FIGURES:
                    self._dropped.add(name)
                    continue
                self.figures[name] = Columns()
            number = NAN if value is None else float(value)
            self.figures[name].append({"step": float(log.step), "time": float(log.time), "value": number})


def _time_s(record: Mapping[str, Any]) -> float:
    """Returns the time of a record; of one that is no date, a ValueError."""
    if not is_date(record["time"]):
        raise ValueError("time")
    return float(record["time"])


def read_run(folder: Path) -> RecordedRun:
    """Reads the records of a job; empty where there are none.

    Args:
        folder: Folder of the job.

    Raises:
        OSError: The records cannot be read.
    """
    run = RecordedRun()
    run.take(RecordFollower(JobPaths(folder).records).read())
    return run


def _mean_of(name: str, spread: StepSpread) -> dict[str, float]:
    if not (spread.least and spread.median and spread.most):
        return {}
    return {
        f"{name}.least": math.fsum(spread.least) / len(spread.least),
        f"{name}.median": math.fsum(spread.median) / len(spread.median),
        f"{name}.most": math.fsum(spread.most) / len(spread.most),
        f"{name}.most_rank": float(spread.most_rank),
    }
