"""Whether a job that failed is started again, and after which wait. Pure: the job's facts in, a decision out.

[Note: progress] An attempt made progress if it finished a step that none before it finished, or left a newer
checkpoint. Of a program that never says how far it is, one that lived for the minimum uptime counts. Restarts without
progress are a crash loop: they cost time on every host, and the log of the first failure is the useful one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Each wait between attempts is twice the one before, up to this.
_LONGEST_WAIT_S = 60.0
#: Restarts in a row that may come to nothing.
FRUITLESS_RESTARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """An attempt that failed.

    Attributes:
        uptime_s: seconds from the first rank's start to the end of the attempt; 0 if no rank started.
        step: highest step that one of its ranks finished; None if none ever said.
        checkpoint: text that tells the attempt's newest complete checkpoint from others; None if there is none.
    """

    uptime_s: float
    step: int | None
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class Restart:
    """The job is started again.

    Attributes:
        number: number of this restart, from 1.
        wait_s: seconds to wait before this restart.
    """

    number: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job is not started again; `reason` is None where nobody asked for restarts, or all were used."""

    reason: str | None


class Restarts:
    """The policy of one job over its attempts. See [Note: progress].

    Args:
        most: restarts that the user allows.
        min_uptime_s: an attempt that lived this long begins the waits anew.
        first_wait_s: seconds to wait before the first restart.
    """

    def __init__(self, most: int, *, min_uptime_s: float, first_wait_s: float = 1.0) -> None:
        self._most = most
        self._min_uptime_s = min_uptime_s
        self._used = 0
        self._fruitless = 0
        self._first_wait_s = self._wait_s = first_wait_s
        self._step = 0
        self._checkpoint: str | None = None

    def after(self, end: AttemptEnd) -> Restart | GiveUp:
        """Decides what comes after a failed attempt.

        Args:
            end: end of the attempt; each must be given once, in order.
        """
        progressed = self._progressed(end)
        if progressed:
            self._fruitless = 0
        elif self._used:
            self._fruitless += 1
        if self._used >= self._most:
            return GiveUp(None)
        if self._fruitless >= FRUITLESS_RESTARTS:
            return GiveUp(f"{self._fruitless} restarts in a row made no progress")
        if end.uptime_s >= self._min_uptime_s:
            self._wait_s = self._first_wait_s
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self._used += 1
        return Restart(self._used, wait_s)

    def _progressed(self, end: AttemptEnd) -> bool:
        newer = end.checkpoint is not None and end.checkpoint != self._checkpoint
        self._checkpoint = end.checkpoint
        if end.step is None:
            return newer or end.uptime_s >= self._min_uptime_s
        further = end.step > self._step
        self._step = max(self._step, end.step)
        return newer or further
