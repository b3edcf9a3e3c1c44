"""The table of the collectives, printed on rank 0 at the end of a run. Counts nothing."""

from __future__ import annotations

import os

from ..mesh.comms_log import CommsLog


class CommsReport:
    """Prints the table once.

    Args:
        log: log that has counted.
        tells: whether this rank prints.
    """

    def __init__(self, log: CommsLog, *, tells: bool) -> None:
        self._log = log
        # A script that forks takes a copy of this object along, which has nothing to tell.
        self._process = os.getpid() if tells else -1

    def end_step(self, step: int) -> None:
        """Nothing is told of single steps."""

    def close(self) -> None:
        """Prints the table, the first time."""
        if self._process != os.getpid():
            return
        self._process = -1
        if self._log.calls:
            print("\n".join(self._log.lines()), flush=True)
