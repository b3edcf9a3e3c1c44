"""How an agent brings its host's ranks, and all that they have started, to their end. The agent says when.

[Note: stopping] One way down, entered at any step and never walked back:
- asked: the signal went to every rank's process group; one grace for all ranks together runs.
- killing: SIGKILL to everything below the agent, in rounds, until nothing is left; then to the control group.
What outlives the ranks (detached processes included) is asked when the last rank has ended, then killed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from typing import Protocol

import psutil

from .. import processes

#: Between two looks at processes that must end and give no event when they do.
_ROUND_S = 0.05
#: From SIGKILL to giving up on what is left (a process stuck in the kernel, or another user's).
_KILL_PATIENCE_S = 20.0
#: From SIGKILL to killing the spawner too, should it not report the ends (a debugger may hold it).
_SPAWNER_PATIENCE_S = 2.0
#: For output still in pipes once nothing of the job is alive.
_DRAIN_PATIENCE_S = 5.0


class Ranks(Protocol):
    """The host's ranks as the way down sees them; `HostRanks` says what each does."""

    @property
    def pids(self) -> Collection[int]: ...
    @property
    def all_ended(self) -> bool: ...
    @property
    def spawner_ended(self) -> bool: ...
    def reap(self, *, spawner_may_end: bool) -> None: ...
    def processes_left(self) -> list[psutil.Process]: ...
    def end_scope(self, *, remove: bool) -> None: ...
    def kill_spawner(self) -> bool: ...
    def release_spawner(self) -> bool: ...


class Outputs(Protocol):
    """Their output as the way down sees it; `Relay` says what each is."""

    @property
    def unread(self) -> bool: ...
    @property
    def unsent(self) -> bool: ...
    @property
    def moved_at_s(self) -> float: ...


class HostShutdown:
    """The way down. See [Note: stopping].

    Args:
        ranks: ranks of this host.
        relay: their output, which is read to its end.
        grace_s: seconds between asking the ranks to end and killing them.
    """

    def __init__(self, ranks: Ranks, relay: Outputs, *, grace_s: float) -> None:
        self._ranks = ranks
        self._relay = relay
        self._grace_s = grace_s
        self._grace_until_s: float | None = None
        self._killing_since_s: float | None = None
        self._lingerers_asked = False
        #: Pids that outlived SIGKILL.
        self.unkillable: list[int] = []

    @property
    def is_killing(self) -> bool:
        """Nothing may be started any more."""
        return self._killing_since_s is not None

    def ask(self, signum: int) -> None:
        """Asks all ranks to end, and kills what is left when the grace is over; at once where there are none yet."""
        if self._grace_until_s is not None or self._killing_since_s is not None:
            return
        if not self._ranks.pids:
            # Ranks that are not known yet cannot be asked, and have nothing to save.
            self.kill()
            return
        self._grace_until_s = time.monotonic() + self._grace_s
        processes.send_to_groups(self._ranks.pids, signum)

    def kill(self) -> None:
        """Kills everything from now on."""
        if self._killing_since_s is None:
            self._killing_since_s = time.monotonic()

    def advance(self, now_s: float) -> bool:
        """Does what is due now, in monotonic seconds; returns whether everything has ended."""
        self._ranks.reap(spawner_may_end=self._killing_since_s is not None)
        if self._grace_until_s is not None and now_s >= self._grace_until_s:
            self.kill()
        if self._killing_since_s is not None:
            return self._kill_round(self._killing_since_s, now_s)
        if not self._ranks.all_ended:
            return False
        if left := self._ranks.processes_left():
            self._ask_lingerers(left, now_s)
            return False
        return self._ranks.release_spawner() and self._drained(now_s)

    def due_s(self, now_s: float) -> float | None:
        """When to look again, monotonic; None if only events are waited for."""
        if self._killing_since_s is not None or self._ranks.all_ended:
            return now_s + _ROUND_S
        return self._grace_until_s

    def _ask_lingerers(self, left: list[psutil.Process], now_s: float) -> None:
        if self._lingerers_asked:
            return
        self._lingerers_asked = True
        for process in left:
            processes.send(process, signal.SIGTERM)
        if self._grace_until_s is None:
            self._grace_until_s = now_s + self._grace_s

    def _kill_round(self, since_s: float, now_s: float) -> bool:
        left = self._ranks.processes_left()
        if left and now_s >= since_s + _KILL_PATIENCE_S:
            self.unkillable = [process.pid for process in left]
            return True
        for process in left:
            processes.send(process, signal.SIGKILL)
        if left and now_s >= since_s + _SPAWNER_PATIENCE_S:
            # It forks faster than it is found, or is not seen to end.
            self._ranks.end_scope(remove=False)
        if not (self._ranks.pids and now_s < since_s + _SPAWNER_PATIENCE_S) and self._ranks.kill_spawner():
            # It has nothing to report, or does not: otherwise it is waited for, as it knows how the ranks ended.
            return False
        if left or not (self._ranks.all_ended or self._ranks.spawner_ended):
            return False
        # A rank whose spawner is gone may have ended since the last look. Now that nothing lives, nothing can any more.
        self._ranks.reap(spawner_may_end=True)
        return self._ranks.release_spawner() and self._drained(now_s)

    def _drained(self, now_s: float) -> bool:
        """Whether all output was read; a pipe that does not end though nobody is left is given up at last."""
        if not self._relay.unread:
            return True
        return not self._relay.unsent and now_s - self._relay.moved_at_s > _DRAIN_PATIENCE_S
