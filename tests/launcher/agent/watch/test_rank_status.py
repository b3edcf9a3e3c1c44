"""A pulse says what a rank said last, and what it used since the pulse before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from dsrun.contract.heartbeats import HeartbeatTable, HeartbeatWriter, StartState
from dsrun.launcher.agent.start.worker import RankProcess
from dsrun.launcher.agent.watch.rank_status import StatusTaking


class ScriptedProcess:
    """What psutil would say of a process; ended once its processor time is None."""

    def __init__(self) -> None:
        self.user_s: float | None = 0.0

    def cpu_times(self) -> Any:
        if self.user_s is None:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(user=self.user_s, system=0.5)

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=1 << 20)


@pytest.fixture
def table() -> Iterator[HeartbeatTable]:
    table = HeartbeatTable(2)
    yield table
    table.close()


def live(rank: int, process: ScriptedProcess) -> RankProcess:
    return RankProcess(rank, rank % 2, cast("psutil.Process", process))


def test_processor_time_is_counted_from_one_pulse_to_the_next(table: HeartbeatTable) -> None:
    taking, process = StatusTaking(table), ScriptedProcess()
    shares: list[float] = []
    for now_s, user_s in ((10.0, 3.0), (12.0, 5.0), (13.0, 5.25)):
        process.user_s = user_s
        (pulse,) = taking.take([live(0, process)], now_s).ranks
        shares.append(pulse.cpu_percent)
    assert shares == [0.0, 100.0, 25.0]
    assert pulse.rss_bytes == 1 << 20


def test_a_rank_that_has_ended_is_left_out(table: HeartbeatTable) -> None:
    ended, lives = ScriptedProcess(), ScriptedProcess()
    ended.user_s = None
    assert [pulse.rank for pulse in StatusTaking(table).take([live(0, ended), live(1, lives)], 10.0).ranks] == [1]


def test_a_rank_is_heard_through_the_slot_of_its_place_on_the_host(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(f"/proc/{os.getpid()}/fd/{table.descriptor}", 1)
    writer.beat(step=4, phase="forward")
    writer.tell_longest_wait("reduce_scatter of unit 3", 0.25, 0.5)
    writer.tell_stage(1, 2, schedule_wait=0.11111)
    writer.tell_stage_wait(0.125)
    writer.tell_coordinate("data 1, tensor 0")
    writer.enter("all_gather of unit 12")
    beat = table.read(1)
    assert beat is not None
    silent, heard = (
        StatusTaking(table).take([live(6, ScriptedProcess()), live(7, ScriptedProcess())], beat.time_s + 2).ranks
    )
    assert (silent.beats, silent.step, silent.idle_s, silent.phase, silent.collective) == (0, None, None, "", "")
    assert (heard.beats, heard.step, heard.idle_s) == (2, 4, 2.0)
    assert (heard.phase, heard.collective) == ("forward", "all_gather of unit 12")
    assert (silent.longest_wait, silent.longest_wait_s, silent.step_s) == ("", 0.0, 0.0)
    assert (heard.longest_wait, heard.longest_wait_s, heard.step_s) == ("reduce_scatter of unit 3", 0.25, 0.5)
    assert (silent.stage, silent.stages, silent.schedule_wait, silent.stage_wait_s) == (0, 0, 0.0, 0.0)
    assert (heard.stage, heard.stages, heard.schedule_wait, heard.stage_wait_s) == (1, 2, 0.1111, 0.125)
    assert (silent.coordinate, heard.coordinate) == ("", "data 1, tensor 0")


@pytest.mark.parametrize(
    ("state", "python", "program"),
    [
        (StartState.NOT_BEGUN, "interpreter", ""),
        (StartState.RUNS, "", ""),
        (StartState.IMPORTS_TORCH, "torch", "torch"),
    ],
)
def test_a_pulse_says_what_a_ranks_start_is_at(
    table: HeartbeatTable, state: StartState, python: str, program: str
) -> None:
    HeartbeatWriter(table.path, 1).tell_start(state)
    for are_python, expected in ((True, python), (False, program)):
        (found,) = StatusTaking(table, are_python=are_python).take([live(1, ScriptedProcess())], 1.0).ranks
        assert (found.starting, found.beats, found.idle_s) == (expected, 0, None)
