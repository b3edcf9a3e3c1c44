"""What makes a person's wish to stop the job: signals, and a reader of the output that goes away. Stops nothing itself.

One wish may arrive twice: Ctrl-C in `dsrun ... | tee log` ends tee as well, so the signal and the closed pipe come
together, in either order. Passed on as two requests they would cost the ranks their grace.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from .output import CLOSED_PIPE_EXIT

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Counts wishes and passes each on once."""

    def __init__(self, request_stop: Callable[[int, str | None], None]) -> None:
        """Prepares to pass wishes on.

        Args:
            request_stop: takes the signal that stands for the wish, and its reason where that is another; called
                from signal handlers too.
        """
        self._request_stop = request_stop
        self._first_signal: int | None = None
        self._closed = False

    def output_closed(self) -> None:
        """Nobody reads what ranks write: a wish to stop, unless a signal said so already."""
        if self._first_signal is None and not self._closed:
            self._closed = True
            # Not SIGPIPE: Python ignores it, and so would the ranks.
            self._request_stop(signal.SIGTERM, "nobody reads the output")

    def signalled(self, signum: int) -> None:
        """A signal came: a wish to stop, unless it is the other half of a closed pipe."""
        is_other_half = self._closed and self._first_signal is None
        if self._first_signal is None:
            self._first_signal = signum
        if not is_other_half:
            self._request_stop(signum, None)

    def exit_code(self, stopped_code: int) -> int:
        """Returns the code of a job that was stopped.

        Args:
            stopped_code: what the session makes of the first request it saw.
        """
        if not self._closed:
            return stopped_code
        return CLOSED_PIPE_EXIT if self._first_signal is None else 128 + self._first_signal

    @contextmanager
    def catching_signals(self) -> Generator[None, None, None]:
        """Listens while the block runs.

        A hangup that was ignored at the start stays ignored: that is what `nohup` is for. An ignored interrupt does
        not: shells ignore it for every `command &` of a script, and whoever sends it means this job.
        """

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self.signalled(signum)

        before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        caught = [signum for signum in _SIGNALS if signum != signal.SIGHUP or before[signum] is not signal.SIG_IGN]
        for signum in caught:
            signal.signal(signum, on_signal)
        try:
            yield
        finally:
            for signum in caught:
                signal.signal(signum, before[signum])
