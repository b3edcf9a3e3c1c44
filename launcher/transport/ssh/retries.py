"""Knocks again at a host whose ssh server is not there yet, or drops connections, until its time is over.

A host may still be booting, and a server drops connections at random where many come at once (`MaxStartups`, by
default 10 that have not logged in). What repeats itself, as a refused key does, is not tried again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .faults import NotYet

#: Between two knocks at first, and at most. Each is cut by a random part, so that many do not come back at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0
#: A fault that passes within this time is not worth a line.
_TELL_AFTER_S = 1.0
#: The least time in which a connection may come about.
_LEAST_S = 1.0

_Result = TypeVar("_Result")


def knock(
    connect: Callable[[float], _Result],
    *,
    patience_s: float,
    stopped: threading.Event,
    note: Callable[[str], None] | None,
) -> _Result:
    """Returns what `connect` does, which is called again as long as it raises `NotYet`.

    Args:
        connect: function that makes the connection; it gets the seconds that it may wait for an answer.
        patience_s: seconds from now to the last try.
        stopped: event that ends the tries early.
        note: callback that gets one line about what is waited for, once, if the wait lasts; None for none.

    Raises:
        LaunchError: of the last try.
    """
    began_s = time.monotonic()
    longest_s = _FIRST_PAUSE_S
    while True:
        try:
            return connect(max(_LEAST_S, round(began_s + patience_s - time.monotonic(), 1)))
        except NotYet as fault:
            left_s = began_s + patience_s - time.monotonic()
            # The last knock is as late as it may be.
            pause_s = min(longest_s * random.uniform(0.5, 1), left_s - _LEAST_S)
            longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)
            if pause_s <= 0:
                raise
            if note is not None and patience_s - left_s >= _TELL_AFTER_S:
                note(f"{fault.problems[0].message}; trying again for {left_s:.0f} s")
                note = None
            if stopped.wait(pause_s):
                raise
