"""Giving a job's records to one tracker: from where it is to where they end, and again after a failure.

A tracker may raise, or take for ever: only this process waits. What it took is written down batch by batch; what it
raised over is given again to a tracker that is opened anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TypeVar

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.monitor_records import MonitorSettings
from dsrun.errors import DsrunError

from ..console.status_area import plain
from ..masking import Masker
from ..records.follow import RecordFollower
from .points import Point, PointReader
from .state import MonitorState, StateFile
from .trackers.tracker import TrackedRun, Tracker, TrackerProblem

#: Points given at once.
_BATCH = 500
#: Between two looks at the records.
POLL_S = 1.0
#: Waits after failures in a row; the last one repeats.
_RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)

#: Letters of what a package says of a failure, which may be the page of a web server.
_MOST_REASON = 300

_T = TypeVar("_T")

Opener = Callable[[TrackedRun], Tracker]


class Word(Enum):
    """What the front end has said.

    `NONE`: nothing new. `ENDED`: the job has ended, and all records are written. `GONE`: there is no front end any
    more.
    """

    NONE = 0
    ENDED = 1
    GONE = 2


class Feed:
    """One tracker and how far it is.

    Args:
        folder: Folder of the job.
        settings: Settings of the tracker.
        run: The run as the tracker gets to know it; `kept` and `samples` are filled in here.
        opener: Function that opens the tracker.
        masker: Masker for what a tracker's package says of a failure, which may quote its key.
    """

    def __init__(
        self, folder: Path, settings: MonitorSettings, run: TrackedRun, opener: Opener, *, masker: Masker
    ) -> None:
        self._records = JobPaths(folder).records
        self._with_timers = settings.with_timers
        self._file = StateFile(folder, settings)
        self._opener = opener
        self._masker = masker
        self.state = self._file.read()
        self._run = replace(run, kept=self.state.kept)
        #: Engines that train in the process of rank 0, as far as is known; the first one's records are given.
        self.engines = 1
        #: Records of a known event that lack a field: those of another version, or damaged.
        self.unread = 0
        #: Number of the first step that was taken again since this was read last; None where none was.
        self.again_from: int | None = None
        self._tracker: Tracker | None = None
        #: The next point is the first that this process gives to the tracker.
        self._begins = True
        self._reader = PointReader(with_timers=settings.with_timers, step=self.state.step)
        self._follower = RecordFollower(self._records, offset=self.state.offset)

    def give(self) -> bool:
        """Gives all that is there to the tracker; returns whether there was anything.

        Raises:
            TrackerProblem: the tracker did not take it, or the records or the state could not be read or written.
        """
        gave = False
        try:
            batches = self._batches()
            for points, state in batches:
                again = [point.step for point in points if point.after_samples is not None]
                if points:
                    self._write(points)
                if again:
                    self.again_from = again[0]
                self.state = state
                self._file.write(state)
                self.unread += self._reader.take_unread()
                gave = True
        except TrackerProblem:
            self._start_over()
            raise
        except OSError as error:
            self._start_over()
            raise TrackerProblem(f"{error.filename or self._records}: {(error.strerror or str(error)).lower()}") from (
                error
            )
        return gave

    def close(self) -> None:
        """Closes the tracker behind the last record.

        Raises:
            TrackerProblem: it did not let itself be closed, and is opened anew by the next `give`.
        """
        tracker, self._tracker = self._tracker, None
        if tracker is None and self.state.closed:
            return
        try:
            if tracker is not None:
                self._guard(tracker.close)
            self.state = replace(self.state, closed=True)
            self._file.write(self.state)
        except OSError as error:
            raise TrackerProblem(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error

    def _write(self, points: list[Point]) -> None:
        if self._tracker is None:
            run = replace(self._run, samples=self.state.samples, kept=self.state.kept)
            self._tracker = self._guard(lambda: self._opener(run))
            # Or a monitor that is killed from here on would begin a second run in the tracker.
            self._file.write(self.state)
        if self._begins:
            # Whatever the tracker was given beyond what is written down, by a monitor that was killed, comes again.
            first, before = points[0], self.state.samples
            # A job that goes on from another's checkpoint may evaluate first, at the other's last step.
            after = first.samples - first.is_step if before is None else min(before, first.samples)
            told = first.after_samples
            points = [replace(first, after_samples=after if told is None else min(after, told)), *points[1:]]
        tracker, given = self._tracker, points
        self._guard(lambda: tracker.write(given))
        self._begins = False

    def _batches(self) -> Iterator[tuple[list[Point], MonitorState]]:
        """Yields points, and the state once they are given; no record is read twice."""
        records = self._follower.read()
        while batch := list(islice(records, _BATCH)):
            points = [point for record in batch for point in self._reader.read(record)]
            self.engines = self._reader.engines
            last = points[-1] if points else None
            yield (
                points,
                MonitorState(
                    offset=self._follower.offset,
                    step=self.state.step if last is None else last.step,
                    samples=self.state.samples if last is None else last.samples,
                    kept=self.state.kept,
                ),
            )

    def _start_over(self) -> None:
        """Forgets the tracker: the next one is opened anew, behind what is written down."""
        tracker, self._tracker, self._begins = self._tracker, None, True
        if tracker is not None:
            with suppress(TrackerProblem):
                # It is the tracker that has failed, which is told already.
                self._guard(tracker.close)
        self._reader = PointReader(with_timers=self._with_timers, step=self.state.step)
        self._follower = RecordFollower(self._records, offset=self.state.offset)

    def _guard(self, act: Callable[[], _T]) -> _T:
        """Does an act of a tracker; whatever its package raises is a problem of the tracker, and of nothing else."""
        try:
            return act()
        except TrackerProblem:
            raise
        except DsrunError as error:
            raise TrackerProblem(self._masker.text(str(error))) from error
        except (Exception, SystemExit) as error:
            # Hidden before it is cut: a part of a key is not known for one.
            text = self._masker.text(plain(" ".join(str(error).split()))) or "no reason is given"
            raise TrackerProblem(f"{type(error).__name__}: {text[:_MOST_REASON]}") from error


def follow(
    feed: Feed, wait: Callable[[float], Word], note: Callable[[str], None], *, on_again: str | None = None
) -> None:
    """Gives records to a tracker until the job has ended and the tracker has all of them, or the front end is gone.

    Args:
        feed: Tracker, and how far it is.
        wait: Function that waits for a word of the front end, at most so many seconds.
        note: Function that tells a line to the user.
        on_again: Words for what the tracker does with steps that are taken again; None where nothing is to be told.
    """
    failures, has_ended, told, engines = 0, False, "", 1
    while True:
        try:
            feed.give()
            if failures:
                note("takes scalars again, from where it stopped")
            failures, told = 0, ""
            if feed.again_from is not None and on_again is not None:
                note(f"steps from {feed.again_from} on were taken again: {on_again}")
            feed.again_from = None
            if feed.engines > engines:
                note(f"it gets the steps of the first engine alone, of {feed.engines} in the process of rank 0")
            engines = feed.engines
            if has_ended:
                if feed.unread:
                    note(f"{feed.unread} records are of another version or damaged, and were passed over")
                    feed.unread = 0
                feed.close()
                return
        except TrackerProblem as problem:
            # One line for a failure that repeats: a tracker that is down for a night is not told of a thousand times.
            if str(problem) != told:
                note(f"{problem}; tried again, training goes on")
            told = str(problem)
            failures += 1
        pause_s = POLL_S if not failures else _RETRY_S[min(failures, len(_RETRY_S)) - 1]
        word = wait(pause_s) if not has_ended or failures else Word.NONE
        if word is Word.GONE:
            return
        has_ended = has_ended or word is Word.ENDED
