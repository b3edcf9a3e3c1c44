"""Processor seconds as on a core of a fixed speed, so that a bound on them holds on slow and shared cores too.

[Note: seconds of a core]
A core is taken to do `_work` in `_WORK_S`, as that of the machine on which most bounds were set does while nobody else
has a part of it. A core that takes twice as long, be it slow or shared, counts half of its seconds; a faster one counts
them as they are. So a bound is about the code alone. The work is done before each measurement and behind it, and of
the measurements the least counts.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

#: Measured: 0.0137 s. Of 120 runs in a few minutes the middle one took twice as long, for others shared the core.
_WORK_S = 0.014
#: Runs of the work on each side of a measurement.
_RUNS = 4


def core_seconds(act: Callable[[], Any], *, tries: int = 3) -> float:
    """Returns the least processor seconds of a call in this process; see [Note: seconds of a core].

    Args:
        act: function that is measured; its result is left alone.
        tries: calls of it.
    """

    def measure() -> float:
        started_s = time.process_time()
        act()
        return time.process_time() - started_s

    return least_seconds(measure, tries=tries)


def program_core_seconds(command: Sequence[str], *, tries: int = 3, **options: Any) -> float:
    """Returns the least processor seconds of a program and of what it waits for; see [Note: seconds of a core].

    Args:
        command: program and its arguments; what it prints is thrown away.
        tries: runs of it.
        options: further arguments of `subprocess.Popen`.

    Raises:
        subprocess.CalledProcessError: it has failed.
    """

    def measure() -> float:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        return used.ru_utime + used.ru_stime

    return least_seconds(measure, tries=tries)


def least_seconds(measure: Callable[[], float], *, tries: int = 3) -> float:
    """Returns the least of some measurements in seconds of the fixed core; see [Note: seconds of a core].

    Args:
        measure: function that returns processor seconds.
        tries: calls of it.
    """
    before = _work_seconds()
    found: list[float] = []
    for _ in range(tries):
        seconds = measure()
        after = _work_seconds()
        found.append(seconds / max(1.0, mean((before, after)) / _WORK_S))
        before = after
    return min(found)


def _work_seconds() -> float:
    started_s = time.process_time()
    for _ in range(_RUNS):
        _work()
    return (time.process_time() - started_s) / _RUNS


def _work() -> None:
    """Makes objects, looks them up and throws them away: what code of Python mostly does."""
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for number in range(50_000):
        found[number % 5_000, number & 1] = (number, str(number))
