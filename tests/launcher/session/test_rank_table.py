"""What is known of ranks and hosts, in the order it came."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dsrun.contract.error_file import WorkerError
from dsrun.launcher.failures.report import HostLoss
from dsrun.launcher.plan.launch_plan import LaunchPlan, Outside
from dsrun.launcher.protocol import Exit, RankStatus
from dsrun.launcher.session.rank_table import RankTable
from support.jobs import program_plan


def exited(rank: int, status: int = 0, *, step: int | None = None, error: WorkerError | None = None) -> Exit:
    return Exit(rank=rank, status=status, time_s=5.0, step=step, error=error)


def two_hosts(folder: Path) -> LaunchPlan:
    return program_plan(folder, "command", "true", hosts=2)


def outcome(table: RankTable) -> tuple[int, int | None]:
    end = table.outcome(tail=lambda rank: (), log=lambda rank: "")
    return end.exit_code, end.step


def test_a_host_runs_from_its_start_to_its_last_ranks_end(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path)
    table, first = RankTable(plan), plan.nodes[0]
    assert not table.is_running(first)
    table.started(first, [11, 12])
    table.exited(exited(0))
    assert table.is_running(first)
    table.exited(exited(1))
    assert (table.is_running(first), table.all_ended(first), table.all_ended(plan.nodes[1])) == (False, True, False)
    assert table.ended_well() == [0, 1]


def test_ranks_of_a_lost_host_are_not_counted_as_running(tmp_path: Path) -> None:
    table = RankTable(two_hosts(tmp_path))
    assert table.running_ranks() == 4
    table.exited(exited(0))
    loss = HostLoss(host="here2", reason="gone", time_s=1.0)
    assert table.lost(loss)
    assert not table.lost(dataclasses.replace(loss, reason="later, and so no news"))
    assert table.running_ranks() == 1


def test_the_highest_step_counts_whoever_told_it(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path)
    table = RankTable(plan)
    for rank in plan.ranks:
        table.exited(exited(rank, step=10 - rank))
    assert outcome(table) == (0, 10)


def test_only_a_mistakes_own_lines_end_a_ranks_log(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path)
    table = RankTable(plan)
    mistake = WorkerError(message="error: no", traceback="", time_s=1.0)
    table.exited(exited(1, 2, error=mistake))
    table.exited(exited(2, 1, error=dataclasses.replace(mistake, traceback="Traceback ...")))
    ended: dict[int, str | None] = {}
    table.end_outputs(lambda rank, word: ended.update({rank: word}))
    assert ended == {0: None, 1: "error: no", 2: None, 3: None}


def test_of_a_job_with_hosts_outside_only_the_own_ranks_are_known(tmp_path: Path) -> None:
    plan = program_plan(tmp_path, "command", "true", outside=Outside(node_rank=1, node_count=3, port=1))
    table = RankTable(plan)
    ended: list[int] = []
    table.end_outputs(lambda rank, word: ended.append(rank))
    assert ended == [2, 3]
    for rank in plan.ranks:
        table.exited(exited(rank, 3))
    end = table.outcome(tail=lambda rank: (), log=lambda rank: "")
    assert [rank.rank for rank in end.ends] == [2, 3]
    assert end.exit_code == 3


def pulsed(rank: int, coordinate: str) -> RankStatus:
    return RankStatus(
        rank=rank,
        beats=1,
        step=None,
        idle_s=0.0,
        waited_s=0.0,
        phase="",
        collective="",
        cpu_percent=0.0,
        rss_bytes=0,
        coordinate=coordinate,
    )


def test_a_rank_is_named_with_the_coordinate_that_it_said_last(tmp_path: Path) -> None:
    table = RankTable(two_hosts(tmp_path))
    assert table.name_of(0) == "rank 0"
    table.pulse([pulsed(0, "data 0, tensor 0"), pulsed(1, "data 0, tensor 1"), pulsed(2, "")])
    assert [table.name_of(rank) for rank in range(4)] == [
        "rank 0 (data 0, tensor 0)",
        "rank 1 (data 0, tensor 1)",
        "rank 2",
        "rank 3",
    ]
    # It ended before a pulse could say it.
    table.exited(dataclasses.replace(exited(3, -9), coordinate="data 1, tensor 1"))
    ends = table.outcome(tail=lambda rank: (), log=lambda rank: "").ends
    assert [end.name for end in ends] == [
        "rank 0 (data 0, tensor 0)",
        "rank 1 (data 0, tensor 1)",
        "rank 2",
        "rank 3 (data 1, tensor 1)",
    ]
