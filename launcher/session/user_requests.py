"""What the user wants of a job from its first moment to its last: one queue, filled by signals and read by the session.

Acts on nothing, and catches no signal: see console/signals.py. All that fills it may be called from signal handlers, on
the main thread. A stop that comes while there is no session yet is kept, and is the first request of the first one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..failures.causes.recognise import signal_name
from ..failures.report import UserStop


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Request to end the job.

    Attributes:
        stop: the signal and when it came.
        reason: words by which notes call the request, such as the signal's name.
        at_once: whether the job ends at once, without grace.
    """

    stop: UserStop
    reason: str
    at_once: bool


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """Request to pass a signal on to the ranks that catch it, which stops nothing.

    Attributes:
        signal: number of the signal, SIGUSR1 for example.
    """

    signal: int


@dataclass(frozen=True, slots=True)
class Remark:
    """Note to be shown when the session's thread gets to it.

    Attributes:
        text: one line.
    """

    text: str


UserRequest = StopRequest | SignalRequest | Remark


class RequestReader(Protocol):
    """Who acts on requests: the session of the present attempt."""

    def wake(self) -> None:
        """Ends a wait, for a request came; may be called from a signal handler."""
        ...

    def handle_requests(self) -> bool:
        """Acts on all requests that are there; returns whether the job is still to be waited for."""
        ...


class Interrupted(Exception):
    """The user wants no job any more, while what comes before it was under way."""


class UserRequests:
    """The requests of one job, over all its attempts, in the order they came."""

    def __init__(self) -> None:
        #: The signal of the first stop that came before there was a session to take it.
        self.stop_before_start: int | None = None
        #: The first stop that a session was asked for, unless all of them were one rank's own.
        self.stop: UserStop | None = None
        #: Stops that were one rank's own, see [Note: an interrupt at a prompt] in interrupts.
        self.interrupts_given = 0
        self._stops = 0
        self._pending: deque[UserRequest] = deque()
        self._reader: RequestReader | None = None
        self._wake_job: Callable[[], None] = lambda: None

    # --- filled by the front end

    def request_stop(self, signum: int, reason: str | None = None) -> None:
        """Asks for the end of the job, not only of its present attempt. See [Note: escalation] in shutdown.

        Args:
            signum: the signal the user sent: ranks get it too, and the exit code becomes 128 + signum.
            reason: words that notes use in place of the signal's name, where it was no signal; None uses the name.
        """
        if self._reader is not None:
            self._add_stop(signum, reason or signal_name(signum), at_once=False)
        elif self.stop_before_start is None:
            self.stop_before_start = signum

    def kill_now(self, signum: int) -> None:
        """Asks for the end of the job without grace.

        Args:
            signum: the exit code becomes 128 + signum.
        """
        if self._reader is not None:
            self._add_stop(signum, signal_name(signum), at_once=True)
        else:
            self.request_stop(signum)

    def pass_signal(self, signum: int) -> None:
        """Asks to pass a signal on to the ranks that catch it; before the job there is nobody to get it.

        Args:
            signum: the signal.
        """
        if self._reader is not None:
            self._add(SignalRequest(signum))

    def remark(self, text: str) -> None:
        """Asks for a note; before the job nobody shows it.

        Args:
            text: one line.
        """
        if self._reader is not None:
            self._add(Remark(text))

    def check(self) -> None:
        """Returns if a job is still wanted; for what comes before it, now and then while it waits.

        Not raised by the signal's own handler: an exception in the middle of anything, a thread's start for example,
        leaves it half done.

        Raises:
            Interrupted: a stop came.
        """
        if self.stop_before_start is not None:
            raise Interrupted

    def handle_pending(self) -> bool:
        """Has the session act on what was asked for since, on its thread; for a console that waits for its reader.

        Returns:
            whether the job is still to be waited for.
        """
        return self._reader is None or self._reader.handle_requests()

    # --- read by the job and the session of its present attempt

    def wake_job_by(self, wake: Callable[[], None]) -> None:
        """Has a function called at each request, beside the session's, which sleeps between two attempts.

        Args:
            wake: function that ends the job's wait; it is called from signal handlers too.
        """
        self._wake_job = wake

    def read_by(self, reader: RequestReader) -> None:
        """Gives all requests to a session from now on.

        Args:
            reader: the session.
        """
        is_first, self._reader = self._reader is None, reader
        if is_first and self.stop_before_start is not None:
            self.request_stop(self.stop_before_start)

    def take(self) -> UserRequest | None:
        """Takes out the oldest request; None where there is none. One thread alone calls this."""
        return self._pending.popleft() if self._pending else None

    def forget_interrupts(self) -> None:
        """Forgets the stop, once an attempt has ended, if there was none but for one rank alone."""
        if self._stops == self.interrupts_given:
            self.stop = None

    def _add_stop(self, signum: int, reason: str, *, at_once: bool) -> None:
        stop = UserStop(signal=signum, time_s=time.time())
        self._stops += 1
        self.stop = self.stop or stop
        self._add(StopRequest(stop, reason, at_once=at_once))

    def _add(self, request: UserRequest) -> None:
        self._pending.append(request)
        self._wake_job()
        if self._reader is not None:
            self._reader.wake()
