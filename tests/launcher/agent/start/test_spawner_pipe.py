"""The end of a spawner is told with what is known of why."""

from __future__ import annotations

import signal

import pytest

from dsrun.launcher.agent.start.spawner_pipe import reason_of_end
from dsrun.launcher.protocol import OomKill

LIMIT = OomKill(by="limit", group="/job", limit_bytes=8 << 30)


@pytest.mark.parametrize(
    ("status", "oom", "reason"),
    [
        (1, None, "the spawner exited with code 1 before its ranks ended"),
        (1, LIMIT, "the spawner exited with code 1 before its ranks ended"),
        (-signal.SIGKILL, None, "the spawner was killed by SIGKILL before its ranks ended"),
        (
            -signal.SIGKILL,
            LIMIT,
            "the spawner was killed by SIGKILL before its ranks ended: out of memory: the limit of 8.0 GiB of the "
            "control group /job",
        ),
    ],
)
def test_a_spawner_that_the_kernel_killed_for_memory_is_told_as_such(
    status: int, oom: OomKill | None, reason: str
) -> None:
    assert reason_of_end(status, oom) == reason
