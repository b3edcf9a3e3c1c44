"""Jobs whose metrics are told: those that were named, or all that run, as they come and go. Serves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..jobs.folder import jobs_folder
from ..jobs.listing import Job, job_ids, read_job
from .run_view import RunView, RunWatcher

#: Between two looks for jobs that are new.
_NEW_JOBS_S = 5.0
#: After its end a job is told of so long, for whoever asks every minute to see how it ended.
KEPT_S = 300.0
#: Seconds of a look that are spent on the records of a job at most.
_READ_S = 0.25


class FollowedJobs:
    """Follows jobs.

    Args:
        named: Jobs to follow, however they are; empty for all that run.
        environ: Environment variables; XDG_STATE_HOME or HOME says where the state folder is.
        hosts_of: Function that returns the host of each rank of a job, by rank.
        clock: Function that returns seconds and never goes back.
    """

    def __init__(
        self,
        named: Sequence[Job],
        environ: Mapping[str, str],
        hosts_of: Callable[[Job], Sequence[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._takes_new = not named
        self._environ = environ
        self._hosts_of = hosts_of
        self._clock = clock
        self._watchers: dict[str, RunWatcher] = {}
        # Of a job whose records are not read to their end yet the newest step is an old one.
        self._is_read: set[str] = set()
        self._ended_s: dict[str, float] = {}
        self._known: set[str] = set()
        self._next_new_s = -1.0
        #: What was wrong with jobs at the last look, by id.
        self.problems: dict[str, str] = {}
        for job in named:
            self._add(job)

    def look(self) -> bool:
        """Takes what is new; returns whether all records were read to their end.

        Raises:
            UsageError: the state folder cannot be read.
        """
        if self._takes_new and self._clock() >= self._next_new_s:
            self._next_new_s = self._clock() + _NEW_JOBS_S
            self._find_new()
        for job_id, watcher in list(self._watchers.items()):
            if job_id in self._ended_s:
                if self._takes_new and self._clock() - self._ended_s[job_id] >= KEPT_S:
                    del self._watchers[job_id]
                continue
            try:
                watcher.look(budget_s=_READ_S)
            except OSError as error:
                # The other jobs are told of all the same; this one by what was read before.
                self.problems[job_id] = f"its files cannot be read: {(error.strerror or str(error)).lower()}"
                continue
            self.problems.pop(job_id, None)
            if watcher.figures.is_complete:
                self._is_read.add(job_id)
                if not watcher.job.state.is_live:
                    self._ended_s[job_id] = self._clock()
        return all(
            watcher.figures.is_complete for job_id, watcher in self._watchers.items() if job_id not in self.problems
        )

    def views(self) -> list[RunView]:
        """Returns the jobs whose records were read to their end at least once, the oldest first."""
        return [watcher.view() for job_id, watcher in sorted(self._watchers.items()) if job_id in self._is_read]

    def _add(self, job: Job) -> None:
        self._watchers[job.id] = RunWatcher(job, self._hosts_of(job), with_gpus=False, clock=self._clock)

    def _find_new(self) -> None:
        """Looks at jobs that were not there before: what has ended once does not run again."""
        for name in job_ids(self._environ):
            if name in self._known:
                continue
            job = read_job((jobs_folder(self._environ) / name).resolve())
            if job is not None:
                # One without a record is being made.
                self._known.add(name)
                if job.state.is_live:
                    self._add(job)
