"""docs/guides/many-hosts.md: its launches, over real ssh, print what it shows."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, WAIT, Ended
from support.many_hosts import launched_on_hosts
from support.namespaces import Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(HARD_LIMIT_S + 60)]
GUIDE = (Path(__file__).parents[2] / "docs/guides/many-hosts.md").read_text()
#: Tests set it for themselves; a login that has it would be told so.
A_LOGINS = {"OMP_NUM_THREADS": None}
#: What differs from one launch to the next, and what stands for it.
VARIES = (
    (r"\d{8}-\d{4}-\w{4}", "JOB"),
    (r"\S+/dsrun/jobs/", "JOBS/"),
    (r"(after|in) \d+(\.\d+)? ?(ms|s|m)\b", r"\1 TIME"),
    (r"torch [\d.]+(\+\w+)?", "torch VERSION"),
    (r"at \d+\.\d+\.\d+\.\d+", "at ADDRESS"),
)
SAYS = """
import os
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank} of {size} meets at {os.environ['MASTER_ADDR']}", flush=True)
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        yield made


def shown(number: int) -> tuple[list[str], list[str]]:
    """What the guide's launch of that number prints: ranks' lines, and dsrun's own."""
    command, *lines = re.findall(r"```console\n(.*?)```", GUIDE, re.S)[number].splitlines()
    assert command == "$ dsrun -H hosts train.py"
    return [same(line) for line in lines if line.startswith("[")], [same(line) for line in lines if line[0] != "["]


def said(ended: Ended) -> tuple[list[str], list[str]]:
    return sorted(map(same, ended.out)), list(map(same, ended.err))


def same(line: str) -> str:
    for pattern, stands in VARIES:
        line = re.sub(pattern, stands, line)
    return line


def test_a_launch_prints_what_the_guide_shows(rig: Rig) -> None:
    folder = rig.folder / "launch"
    folder.mkdir()
    with launched_on_hosts(rig, folder, SAYS, "--start", "exec", env=A_LOGINS) as job:
        ended = job.end()
    assert ended.exit_code == 0
    assert said(ended) == shown(0)


def test_a_lost_connection_is_told_as_the_guide_shows(rig: Rig) -> None:
    folder = rig.folder / "lost"
    folder.mkdir()
    with launched_on_hosts(rig, folder, SAYS + WAIT, "--start", "exec", env=A_LOGINS, grace_s=10.0) as job:
        for rank in range(2):
            job.wait_for(f"rank {rank} of 2", "stdout")
        rig.hosts[1].sshd.cut()
        ended = job.end()
    assert ended.exit_code == 74
    assert said(ended) == shown(1)
