"""Signals that ask a run to save and end, as this rank gets them, and as all ranks tell each other. Saves nothing.

A signal comes to each rank at another moment, and to some ranks only. So it is noted, and travels as a number in the
sums of the next optimizer step, which all ranks take together: they then know of it at the same place.

[Note: one wish] Slurm signals every process of a job, and so does its launcher: one wish comes two or three times. What
comes within a few seconds of the first one is the same wish; what comes later is another, to end at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from dsrun.errors import InputError

#: See [Note: one wish].
ONE_WISH_S = 3.0
#: Signals that may ask, the one that goes first where ranks got several of them.
NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2")
#: In a sum over ranks the counts of the three are digits of one number, which fp64 holds exactly.
_BASE = 1 << 17


class StopSignals:
    """Notes signals from `install` to `remove`; what they meant before, they mean again for a second wish.

    Args:
        names: names of the signals to note, each one of `NAMES`.
        is_wanted: whether somebody still acts on them; where not, they mean what they meant before.
        clock: monotonic seconds.

    Raises:
        InputError: there is no such signal to note, or this is not the main thread, which alone may catch signals.
    """

    def __init__(
        self, names: Sequence[str], *, is_wanted: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        unknown = [name for name in names if name not in NAMES]
        if unknown or not names:
            raise InputError(
                f"save_on_signal: signals are {list(names)!r}", hint=f"choose one or more of {', '.join(NAMES)}"
            )
        if threading.current_thread() is not threading.main_thread():
            raise InputError(
                "save_on_signal: Python lets the main thread alone catch signals, and this is another one",
                hint="call dsrun.initialize in the main thread, or leave `checkpoint.save_on_signal` out",
            )
        self._is_wanted = is_wanted
        self._clock = clock
        self._process = os.getpid()
        self._noted: signal.Signals | None = None
        self._noted_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._on_signal)

    @property
    def noted(self) -> signal.Signals | None:
        """The first signal that came to this rank; None where none did."""
        return self._noted

    def remove(self) -> None:
        """Gives signals their former meaning back, but for those that somebody else has caught since."""
        for number in list(self._before):
            self._give_back(number)

    def _give_back(self, number: signal.Signals) -> None:
        before = self._before.pop(number, None)
        if signal.getsignal(number) == self._on_signal:
            # None: it was caught by no code of Python's, which cannot be had back.
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        number = signal.Signals(signum)
        now_s = self._clock()
        of_this_process = os.getpid() == self._process
        if of_this_process and self._is_wanted():
            if self._noted is None:
                self._noted, self._noted_s = number, now_s
                return
            if now_s - self._noted_s < ONE_WISH_S:
                return
        elif not of_this_process and number in (signal.SIGUSR1, signal.SIGUSR2):
            return  # a fork of the rank, which the signal was not meant for
        self._give_back(number)
        os.kill(os.getpid(), number)


def to_number(noted: signal.Signals | None) -> float:
    """Returns what a rank adds to a sum over all ranks; 0 where it got no signal."""
    return 0.0 if noted is None else float(_BASE ** NAMES.index(noted.name))


def from_sum(total: float) -> signal.Signals | None:
    """Returns the signal that ranks agree on by the sum of their numbers; None where none of them got one."""
    if not total:
        return None
    number = int(total)
    return next(signal.Signals[name] for power, name in enumerate(NAMES) if number // _BASE**power % _BASE)
