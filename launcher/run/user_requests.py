"""What the user wants of a job from the first moment on: passed on to it, or kept while there is none to go to yet.

Catches no signal: see stopping. Called from signal handlers, on the main thread.
"""

from __future__ import annotations

from typing import Protocol

from ..console.signals import RunningJob


class ObeyingJob(RunningJob, Protocol):
    """A job that runs, as far as wishes go to it."""

    def request_stop(self, signum: int, why: str | None = None) -> None:
        """Ends the job, with grace."""
        ...

    def obey_requests(self) -> bool:
        """Acts on what was asked for since; returns whether the job is still to be waited for."""
        ...


class Interrupted(Exception):
    """The user wants no job any more, while what comes before it was under way."""


class Wishes:
    """Passes the user's wishes on to the job, and keeps a stop that comes before there is one."""

    def __init__(self) -> None:
        self._job: ObeyingJob | None = None
        #: The signal of the first stop that had no job to go to.
        self.early_stop: int | None = None

    def pass_to(self, job: ObeyingJob) -> None:
        """Passes everything on from now on."""
        self._job = job
        if self.early_stop is not None:
            job.request_stop(self.early_stop)

    def request_stop(self, signum: int, why: str | None = None) -> None:
        """See `JobRun`."""
        if self._job is not None:
            self._job.request_stop(signum, why)
        elif self.early_stop is None:
            self.early_stop = signum

    def check(self) -> None:
        """Returns if a job is still wanted; for what comes before it, now and then while it waits.

        Not raised by the signal's own handler: an exception in the middle of anything, a thread's start for example,
        leaves it half done.

        Raises:
            Interrupted: a stop came.
        """
        if self.early_stop is not None:
            raise Interrupted

    def kill_now(self, signum: int) -> None:
        """See `RunningJob`."""
        if self._job is not None:
            self._job.kill_now(signum)
        else:
            self.request_stop(signum)

    def pass_signal(self, signum: int) -> None:
        """See `RunningJob`; without a rank there is nobody to get it."""
        if self._job is not None:
            self._job.pass_signal(signum)

    def remark(self, text: str) -> None:
        """See `RunningJob`."""
        if self._job is not None:
            self._job.remark(text)

    def obey(self) -> bool:
        """Acts on what was asked for; returns whether the job is still to be waited for."""
        return self._job is None or self._job.obey_requests()
