from __future__ import annotations

import pytest

from dsrun.launcher.failures.report import RankEnd
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.run.outcome_text import closing, opening, outcome_json, without_ranks
from dsrun.launcher.session.rank_table import Outcome


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


def ended(pid: int | None, *, attempts: int = 1) -> Outcome:
    end = RankEnd(
        rank=0, host="a", pid=pid, status=None, time_s=None, error=None, last_lines=(), log="/run/j1/rank0.log"
    )
    return Outcome(exit_code=143, report=None, ends=(end,), attempts=attempts)


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (ended(7), "job j1: stopped after 13.6s, logs in /run/j1"),
        (ended(None), "job j1: stopped before it started (waited 13.6s for its ranks to start)"),
        # The second attempt has not begun, the first one has run.
        (ended(None, attempts=2), "job j1: stopped after 13.6s, 2 attempts, logs in /run/j1"),
    ],
)
def test_a_job_of_which_no_rank_ran_is_not_told_as_one_that_ran(outcome: Outcome, line: str) -> None:
    value = outcome_json(plan_on("a"), outcome, None, exit_code=143, duration_s=13.6, waited_for="its ranks to start")
    assert closing(value) == line
    assert value["never_ran"] == ("before" in line)


def test_a_job_that_failed_before_it_had_ranks_says_what_it_waited_for() -> None:
    value = without_ranks(plan_on("a"), "failed", 75, ["error: a"], duration_s=3.0, waited_for="its hosts")
    assert (
        closing(value)
        == "job j1: failed before it started (waited 3.0s for its hosts) with exit code 75, logs in /run/j1"
    )
