"""How long the front end has been silent, as far as this process could have heard it. Pure: the clock is handed in.

[Note: silence] Only time in which this process looked is counted. One that was stopped, on a machine that slept or was
starved, comes back late by its own fault; the front end's words wait for it in the pipe, and it gets to read them.
The monotonic clock stands still while a machine sleeps; a virtual machine that is paused may not be told.
"""

from __future__ import annotations

#: Longest time between two looks that counts as silence; who looks every second is late by no more on a busy machine.
_LONGEST_LOOK_S = 3.0


class Lifeline:
    """The lease that the front end renews with every message. See [Note: silence].

    Args:
        lease_s: longest silence.
        now_s: monotonic seconds.
    """

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._lease_s = lease_s
        self._silent_s = 0.0
        self._looked_at_s = now_s

    def renew(self) -> None:
        """The front end was heard."""
        self._silent_s = 0.0

    def has_run_out(self, now_s: float) -> bool:
        """Counts the time since the last look; returns whether the front end is to be taken for gone."""
        self._silent_s += min(now_s - self._looked_at_s, _LONGEST_LOOK_S)
        self._looked_at_s = now_s
        return self._silent_s > self._lease_s
