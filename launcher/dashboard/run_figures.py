"""What is kept of a run's records for who looks at it now, in memory that does not grow with the run. Judges nothing.

`records/recorded_run.py` keeps every step, for a report of the whole run. A dashboard is open for days, so here only
the last steps are kept whole, and the curves of all steps are thinned.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
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

from ..records.follow import START_EVENT, RecordFollower
from .thin_curve import ThinCurve

#: Steps that are kept whole.
RECENT_STEPS = 200
#: Skipped steps whose numbers are known, to be taken back if they are taken again.
_KNOWN_SKIPPED = 10_000
#: Names of the script's figures of which the newest value is kept.
MOST_LOGGED = 50
#: Fields that every record of a step has, as `read_step` wants them.
_ALWAYS = ("step", "time", "seconds", "samples", "lr", "applied")
#: Size of a loss from which on it is not drawn: beyond it a sum or a difference of two need not be a number.
_MOST_DRAWN = 1e300
#: Records between two looks at the clock.
_LOOK_EVERY = 64


class RunFigures:
    """Newest figures of a run, and its curves.

    Args:
        folder: Folder of the job.
        clock: Function that returns seconds and never goes back.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = JobPaths(folder).records
        self._follower = RecordFollower(self._path)
        self._clock = clock
        self._skipped_at: deque[int] = deque(maxlen=_KNOWN_SKIPPED)
        #: Record with which the newest attempt began; None before there is one.
        self.start: Mapping[str, Any] | None = None
        self._recent: deque[_LastStep] = deque(maxlen=RECENT_STEPS)
        #: Loss of the whole run.
        self.loss = ThinCurve()
        #: Tokens a second of the whole run, or samples where no tokens are known.
        self.rate = ThinCurve()
        #: Newest comparison of the ranks.
        self.spread: SpreadRecord | None = None
        #: Newest waits of the ranks.
        self.waits: WaitRecord | None = None
        #: Newest figures of the script, the newest record last.
        self.logged: dict[str, LogRecord] = {}
        #: Record of the newest checkpoint.
        self.checkpoint: Mapping[str, Any] | None = None
        #: Steps whose update was not taken.
        self.skipped = 0
        #: Steps that were lost with an attempt and taken again.
        self.lost_steps = 0
        #: Bytes by axis that rank 0 has handed over in all steps; steps that were taken again count twice.
        self.traffic: dict[str, int] = {}
        #: Engines that train in the process of rank 0; figures are those of the first.
        self.engines = 1
        #: Records of a known event that lack a field.
        self.unread = 0
        #: Whether all records were read that were there at the last look.
        self.is_complete = False

    @property
    def recent(self) -> list[StepRecord]:
        """Last steps, the newest at the end."""
        return [each.record for each in self._recent]

    @property
    def last(self) -> StepRecord | None:
        """The newest step; None before there is one."""
        return self._recent[-1].record if self._recent else None

    @property
    def share_read(self) -> float:
        """Share of the records that was read, from 0 to 1."""
        try:
            size = self._path.stat().st_size
        except OSError:
            size = 0
        return min(1.0, self._follower.offset / size) if size else 1.0

    def read(self, *, budget_s: float = math.inf) -> bool:
        """Takes what is new; returns whether anything was.

        Args:
            budget_s: seconds after which the rest is left to the next call.

        Raises:
            OSError: the records cannot be read, but for records that do not exist yet.
        """
        until_s = self._clock() + budget_s
        self.is_complete = True
        number = 0
        for number, record in enumerate(self._follower.read(), start=1):
            try:
                self._take(record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                # Of another version, or damaged, as in `web_report/recorded_run.py`.
                self.unread += 1
            if number % _LOOK_EVERY == 0 and self._clock() >= until_s:
                self.is_complete = False
                break
        return number > 0

    def _take(self, record: Mapping[str, Any]) -> None:
        if engine := record.get("engine", 0):
            # As in `records/recorded_run.py`: steps of an actor and its critic in one curve would be none's.
            self.engines = max(self.engines, engine + 1)
            return
        match record.get("event"):
            case event if event == STEP_EVENT:
                self._take_step(_LastStep(record))
            case event if event == SPREAD_EVENT:
                self.spread = read_spread(record)
            case event if event == WAITS_EVENT:
                self.waits = from_fields(record)
            case event if event == LOG_EVENT:
                self._take_log(read_log(record))
            case event if event == CHECKPOINT_EVENT:
                self.checkpoint = dict(record)
            case event if event == START_EVENT:
                # The ranks are other processes: who was slow before need not be slow now.
                self.start, self.spread, self.waits = dict(record), None, None
            case _:
                pass

    def _take_step(self, step: _LastStep) -> None:
        fields = step.fields
        loss, traffic = fields.get("loss"), dict(fields.get("traffic") or {})
        drawn = loss if loss is not None and abs(loss) < _MOST_DRAWN else None
        before = self._recent[-1] if self._recent else None
        if before is not None and step.step <= before.step:
            self._rewind(step.step)
            before = self._recent[-1] if self._recent else None
        self._recent.append(step)
        if drawn is not None:
            self.loss.add(step.step, drawn)
        rate = fields.get("tokens_per_s")
        if rate is None and before is not None:
            rate = rate_of(step.record, before=before.record)
        if rate is not None:
            self.rate.add(step.step, rate)
        if not fields["applied"]:
            self.skipped += 1
            self._skipped_at.append(step.step)
        for axis, nbytes in traffic.items():
            self.traffic[axis] = self.traffic.get(axis, 0) + nbytes

    def _take_log(self, record: LogRecord) -> None:
        for value in record.values.values():
            if value is not None:
                math.isfinite(value)  # raises where it is no number, or none that a float holds
        for name in record.values:
            self.logged.pop(name, None)
            self.logged[name] = record
        while len(self.logged) > MOST_LOGGED:
            del self.logged[next(iter(self.logged))]

    def _rewind(self, step: int) -> None:
        """Takes back what was told of steps that are taken again, see [Note: records of a run] in the contract."""
        self.lost_steps += self._recent[-1].step - step + 1
        while self._recent and self._recent[-1].step >= step:
            self._recent.pop()
        while self._skipped_at and self._skipped_at[-1] >= step:
            self._skipped_at.pop()
            self.skipped -= 1
        self.loss.cut(step)
        self.rate.cut(step)
        self.logged = {name: each for name, each in self.logged.items() if each.step < step}


class _LastStep:
    """A step as it was written, and as a record once one is asked for: of a long file most are never.

    Args:
        fields: Fields of the step.

    Raises:
        KeyError: one is missing.
        TypeError, ValueError, OverflowError: one is no number, or not finite.
    """

    __slots__ = ("_record", "fields", "step")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if missing := [name for name in _ALWAYS if name not in fields]:
            raise KeyError(*missing)
        if not all(math.isfinite(fields[name]) for name in _ALWAYS):
            raise ValueError(_ALWAYS)
        self.step: int = fields["step"]
        self.fields = fields
        self._record: StepRecord | None = None

    @property
    def record(self) -> StepRecord:
        """The step as a record."""
        if self._record is None:
            self._record = read_step(self.fields)
        return self._record


def rate_of(step: StepRecord, *, before: StepRecord | None) -> float | None:
    """Returns the tokens a second of a step, or its samples a second where no tokens are known."""
    if step.tokens_per_s is not None:
        return step.tokens_per_s
    if before is None or step.seconds <= 0 or step.samples <= before.samples:
        return None
    return (step.samples - before.samples) / (step.seconds * (step.step - before.step))
