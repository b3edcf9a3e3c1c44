from __future__ import annotations

import pytest

from dsrun.launcher.hosts import Allocation, HostSpec
from dsrun.launcher.outcome_text import opening
from dsrun.launcher.plan import LaunchPlan, Program, make_plan


def plan_on(*names: str) -> LaunchPlan:
    return make_plan(
        Allocation(hosts=tuple(HostSpec(name=name, slots=2, source="test") for name in names)),
        Program(kind="script", target="train.py", args=(), python="python"),
        job_id="j1",
        start="fork",
        cwd="/work",
        env={},
        run_dir="/run/j1",
        grace_s=1,
        nonce="n",
    )


@pytest.mark.parametrize(
    ("hosts", "source", "where"),
    [
        (("a",), "", "2 ranks on a"),
        (("a", "b"), "", "4 ranks on 2 hosts"),
        (("a",), "Slurm job 7", "2 ranks on a of Slurm job 7"),
        (("a", "b"), "PBS job 7", "4 ranks on 2 hosts of PBS job 7 (a, b)"),
        (("a", "b", "c", "d", "e", "f"), "LSF job 7", "12 ranks on 6 hosts of LSF job 7 (a, b, c, d and 2 more)"),
    ],
)
def test_the_first_line_says_whose_hosts_a_job_has(hosts: tuple[str, ...], source: str, where: str) -> None:
    line = opening(plan_on(*hosts), devices="", source=source)
    assert line == f"job j1: {where}, train.py, logs in /run/j1"
