"""What makes a person's request about a running job: signals, and a reader of the output that goes away. Acts on none.

- SIGINT, SIGTERM, SIGHUP: stop. SIGQUIT (Ctrl-\\): stop without grace. SIGUSR1, SIGUSR2: meant for the ranks.
- SIGTSTP (Ctrl-Z): refused with a word. A front end that sleeps renews no lease, and its agents would end the job.

One request may arrive twice: Ctrl-C in `dsrun ... | tee log` ends tee as well, so the signal and the closed pipe come
together, in either order. Passed on as two requests they would cost the ranks their grace.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from .printer import CLOSED_PIPE_EXIT

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: Said instead of falling asleep.
NO_SUSPENSION = "a running job cannot be suspended; `dsrun run -d` starts one that needs no terminal"


class RunningJob(Protocol):
    """What other requests than stops are passed to, from signal handlers; see `UserRequests`."""

    def kill_now(self, signum: int) -> None:
        """Ends the job without grace."""
        ...

    def pass_signal(self, signum: int) -> None:
        """Passes a signal on to the ranks."""
        ...

    def remark(self, text: str) -> None:
        """Shows a note."""
        ...


class StopRequests:
    """Counts requests to stop and passes each on once."""

    def __init__(
        self, request_stop: Callable[[int, str | None], None], *, names: Mapping[int, str] | None = None
    ) -> None:
        """Prepares to pass requests on.

        Args:
            request_stop: callback that gets the signal for the request, and a reason where that is not the signal
                itself, else None; called from signal handlers too.
            names: words for notes, by signal, for signals that something other than a person is known to send; None for
                none.
        """
        self._names = names or {}
        self._request_stop = request_stop
        self._first_signal: int | None = None
        self._closed = False

    def output_closed(self) -> None:
        """Nobody reads what ranks write: a request to stop, unless a signal said so already."""
        if self._first_signal is None and not self._closed:
            self._closed = True
            # Not SIGPIPE: Python ignores it, and so would the ranks.
            self._request_stop(signal.SIGTERM, "nobody reads the output")

    def signalled(self, signum: int) -> None:
        """A signal came: a request to stop, unless it is the other half of a closed pipe."""
        is_other_half = self._closed and self._first_signal is None
        if self._first_signal is None:
            self._first_signal = signum
        if not is_other_half:
            self._request_stop(signum, self._names.get(signum))

    def exit_code(self, stopped_code: int) -> int:
        """Returns the code of a job that was stopped.

        Args:
            stopped_code: exit code that the session derives from the first request that it saw.
        """
        if not self._closed:
            return stopped_code
        return CLOSED_PIPE_EXIT if self._first_signal is None else 128 + self._first_signal

    @contextmanager
    def catching_signals(self, job: RunningJob | None = None) -> Generator[None, None, None]:
        """Listens while the block runs.

        A hangup that was ignored at the start stays ignored: that is what `nohup` is for. An ignored interrupt does
        not: shells ignore it for every `command &` of a script, and whoever sends it means this job.

        Args:
            job: job that gets the signals that are no request to stop; None to listen to requests to stop alone.
        """

        def on_stop(signum: int, frame: FrameType | None) -> None:
            self.signalled(signum)

        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = dict.fromkeys(_STOPS, on_stop)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        if job is not None:
            handlers |= self._job_handlers(job)
        before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _job_handlers(self, job: RunningJob) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
        def on_quit(signum: int, frame: FrameType | None) -> None:
            self._first_signal = self._first_signal or signum
            job.kill_now(signum)

        def on_passed(signum: int, frame: FrameType | None) -> None:
            job.pass_signal(signum)

        def on_suspend(signum: int, frame: FrameType | None) -> None:
            job.remark(NO_SUSPENSION)

        return {signal.SIGQUIT: on_quit, signal.SIGTSTP: on_suspend, **dict.fromkeys(_PASSED_ON, on_passed)}
