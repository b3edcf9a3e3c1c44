"""One way down for a host's ranks: whatever the order of their ends, every end is reported before the host's is."""

from __future__ import annotations

from collections.abc import Collection

import psutil

from dsrun.launcher.agent.shutdown import HostShutdown


class DyingRanks:
    """Two ranks whose spawner is dead; the second ends between a look for ended ones and one for living ones."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self._zombies = [0]

    @property
    def pids(self) -> Collection[int]:
        return (100, 101)

    @property
    def all_ended(self) -> bool:
        return len(self.reported) == 2

    @property
    def spawner_ended(self) -> bool:
        return True

    def reap(self, *, spawner_may_end: bool) -> None:
        self.reported += self._zombies
        self._zombies = []

    def processes_left(self) -> list[psutil.Process]:
        self._zombies = [1] if 1 not in self.reported else []
        return []

    def end_scope(self, *, remove: bool) -> None:
        raise AssertionError("nothing is left to be killed")

    def kill_spawner(self) -> bool:
        return False

    def release_spawner(self) -> bool:
        return True


class ReadOutputs:
    unread = False
    unsent = False
    moved_at_s = 0.0


def test_a_rank_that_ends_between_two_looks_is_reported_before_the_host_has_ended() -> None:
    ranks = DyingRanks()
    shutdown = HostShutdown(ranks, ReadOutputs(), grace_s=1.0)
    shutdown.kill()
    assert shutdown.advance(0.0)
    assert ranks.reported == [0, 1]
