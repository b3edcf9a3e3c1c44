"""Whose Ctrl-C is it: the job's, or that of the rank at which a person sits. Pure: sends nothing, and stops nobody.

[Note: an interrupt at a prompt] While a rank waits for a person at its terminal, Ctrl-C is that rank's alone, as under
plain python: `input()` ends the script, a debugger throws the line away and asks anew. If the rank goes on waiting as
if nothing had come, the next one is the job's, as it is at every other time.
"""

from __future__ import annotations

import signal

from ..failures.report import UserStop
from ..protocol import Reading


class Interrupts:
    """See [Note: an interrupt at a prompt]."""

    def __init__(self) -> None:
        self._waiting: int | None = None
        self._given: tuple[int, UserStop] | None = None
        self._is_unanswered = False

    def reading(self, told: Reading) -> None:
        """A rank does this with its stdin."""
        if told.state == "waits":
            self._waiting = told.rank
        elif told.rank == self._waiting:
            self._waiting = None
            self._is_unanswered = False

    def take(self, stop: UserStop) -> int | None:
        """Returns the rank that a request to stop is for; None where it is for the job."""
        if stop.signal != signal.SIGINT or self._waiting is None or self._is_unanswered:
            return None
        self._is_unanswered = True
        self._given = (self._waiting, stop)
        return self._waiting

    def ended(self, rank: int, status: int) -> UserStop | None:
        """Returns the request that a rank has ended of, if it was one.

        Args:
            rank: rank that has ended.
            status: exit code of the rank, or minus the number of the signal that ended it, as in `Exit`.
        """
        if rank == self._waiting:
            self._waiting = None
        given = self._given
        return given[1] if given is not None and given[0] == rank and status == -signal.SIGINT else None
