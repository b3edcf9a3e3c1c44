"""Fault matrix, part A, row A32: many hosts, all of them this machine. See test_faults_process.py.

Not through the command line, which reaches other hosts only from the next version on: through the object it drives.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import Program, make_plan
from dsrun.launcher.session.job_run import JobRun, Policies
from dsrun.launcher.transport.local import LocalChannel, LocalTransport
from support.faults import HARD_LIMIT_S
from support.jobs import RecordingSink
from support.processes import kill_left, wait_until_gone

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0


class Nodes(LocalTransport):
    """Every host is this machine; one is slow to answer, and one cannot be reached."""

    def __init__(self, *, slow: str, dead: str) -> None:
        super().__init__()
        self._before = {
            slow: ["sh", "-c", 'sleep 1; exec "$@"', "sh"],
            dead: ["sh", "-c", "echo 'no route to host' >&2; exit 255", "sh"],
        }
        self.channels: list[LocalChannel] = []

    def start(self, host: HostSpec, argv: Sequence[str]) -> LocalChannel:
        self.channels.append(super().start(host, [*self._before.get(host.name, []), *argv]))
        return self.channels[-1]


def test_A32_of_64_hosts_the_dead_one_is_named_and_the_others_end(tmp_path: Path) -> None:
    hosts = tuple(HostSpec(name=f"n{number:02}", slots=1, source="test") for number in range(64))
    plan = make_plan(
        Allocation(hosts=hosts),
        Program(kind="command", target="sleep", args=("600",), python=sys.executable),
        job_id=f"test-{uuid.uuid4().hex[:8]}",
        start="exec",
        cwd=str(tmp_path),
        env={},
        run_dir=str(tmp_path),
        grace_s=GRACE_S,
        nonce="nonce",
    )
    transport, sink = Nodes(slow="n17", dead="n40"), RecordingSink()
    job = JobRun(plan, transport, JobOutput(plan, sink), python=sys.executable, policies=Policies())
    try:
        outcome = job.run()
        assert wait_until_gone(plan.job_id) == []
    finally:
        kill_left(plan.job_id)
        assert all(channel.wait(10) is not None for channel in transport.channels)
    assert outcome.exit_code == 74
    assert outcome.report is not None
    shown = outcome.report.render()
    assert shown[0].startswith("error: host n40: ")
    assert "  | no route to host" in shown
