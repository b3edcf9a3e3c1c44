"""Ranks tell each other what they wait in, every so many steps and only where the run is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.contract.wait_records import WaitRecord, from_fields
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.wait_times import Waited, WaitTimes
from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.observe.wait_report import STEPS_PER_RECORD, WaitReport, compare, rows_of
from support.late_collectives import LateWorld

CPU = torch.device("cpu")
RANKS = 3
#: Rank 2 is slow: the others wait for it in the reduction.
WAITED = {"reduce_scatter of unit 3": (0.02, 0.03, 0.001), "all_gather of unit 0": (0.002, 0.001, 0.003)}


def waits_of(rank: int, steps: int) -> WaitTimes:
    waits = WaitTimes(HeartbeatWriter(None))
    for _ in range(steps):
        step(waits, rank)
    return waits


def step(waits: WaitTimes, rank: int) -> None:
    for name, seconds in WAITED.items():
        waits.enter(name, WaitKind.THREAD)
        waits.leave(seconds[rank])


def run(
    world: LoopbackWorld, path: Path, steps: int, *, device: torch.device = CPU, is_recorded: bool = True
) -> list[int]:
    """Returns the all-gathers of each rank."""

    def body(axis: LoopbackCollectives) -> int:
        waits = waits_of(axis.rank, 0)
        now_s = iter(range(1000))
        report = WaitReport(
            waits,
            axis,
            RecordWriter(path if axis.rank == 0 else None),
            device=device,
            is_recorded=is_recorded,
            clock=lambda: next(now_s) / 10 * STEPS_PER_RECORD,
        )
        for number in range(1, steps + 1):
            step(waits, axis.rank)
            report.end_step(number)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # as the norm's read
        return axis.traffic.calls["all_gather"]

    return world.run(body)


def records(path: Path) -> list[WaitRecord]:
    read: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["event"] for record in read} == {"waits"}
    return [from_fields(record) for record in read]


def test_a_record_says_of_each_collective_how_long_ranks_waited_and_who_least_and_most(tmp_path: Path) -> None:
    assert run(LoopbackWorld(RANKS), tmp_path / "records", 2 * STEPS_PER_RECORD + 1) == [2] * RANKS
    first, second = records(tmp_path / "records")
    assert (first.step, second.step) == (STEPS_PER_RECORD + 1, 2 * STEPS_PER_RECORD + 1)
    assert (second.steps, second.ranks, second.step_s) == (STEPS_PER_RECORD, RANKS, pytest.approx(0.1))
    reduction, gather = second.labels[:2]
    assert (reduction.label, reduction.waits) == ("reduce_scatter of unit 3", 1)
    assert (reduction.least_s, reduction.median_s, reduction.most_s) == pytest.approx((0.001, 0.02, 0.03))
    assert (reduction.least_rank, reduction.most_rank) == (2, 1)
    assert (gather.label, gather.least_rank, gather.most_rank) == ("all_gather of unit 0", 1, 2)
    assert (second.total.least_rank, second.total.most_rank) == (2, 1)
    assert second.total.least_s == pytest.approx(0.004)


def test_the_first_step_is_not_in_a_record(tmp_path: Path) -> None:
    def body(axis: LoopbackCollectives) -> None:
        waits = WaitTimes(HeartbeatWriter(None))
        waits.enter("building", WaitKind.THREAD)
        waits.leave(100.0)
        report = WaitReport(waits, axis, RecordWriter(tmp_path / "records"), device=CPU, is_recorded=True)
        for number in range(STEPS_PER_RECORD + 1):
            report.end_step(number)

    LoopbackWorld(2).run(body)
    assert records(tmp_path / "records")[0].total.most_s < 1


def test_nothing_is_exchanged_before_so_many_steps_nor_where_nothing_is_recorded(tmp_path: Path) -> None:
    assert run(LoopbackWorld(RANKS), tmp_path / "few", STEPS_PER_RECORD) == [0] * RANKS
    assert run(LoopbackWorld(RANKS), tmp_path / "none", 3 * STEPS_PER_RECORD, is_recorded=False) == [0] * RANKS
    assert not list(tmp_path.iterdir())


def test_a_lone_rank_records_nothing(tmp_path: Path) -> None:
    waits, alone = waits_of(0, 0), AloneCollectives()
    report = WaitReport(waits, alone, RecordWriter(tmp_path / "records"), device=CPU, is_recorded=True)
    for number in range(3 * STEPS_PER_RECORD):
        report.end_step(number)
    assert alone.traffic.calls == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.5)
def test_on_a_gpu_the_record_is_written_a_step_later_and_the_host_waits_for_nothing(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    world = LateWorld(RANKS, device=device, cycles=10_000)
    assert run(world, tmp_path / "records", STEPS_PER_RECORD + 1, device=device) == [1] * RANKS
    assert not list(tmp_path.iterdir())
    world = LateWorld(RANKS, device=device, cycles=10_000)
    run(world, tmp_path / "records", STEPS_PER_RECORD + 2, device=device)
    (record,) = records(tmp_path / "records")
    assert (record.labels[0].label, record.labels[0].least_rank) == ("reduce_scatter of unit 3", 2)


def test_ranks_tell_the_longest_waits_and_the_rest_in_one_row() -> None:
    waits = {f"all_gather of unit {number}": Waited(2, number / 100) for number in range(40)}
    rows = rows_of(waits)
    assert len(rows) == len(rows_of({})) == 32
    assert [seconds for _, _, seconds in rows[:2]] == [0.39, 0.38]
    assert rows[-1][1:] == (2 * 9, pytest.approx(sum(range(9)) / 100))
    assert len({code for code, _, _ in rows}) == 32


def test_what_rank_0_does_not_know_and_what_is_short_is_added_up() -> None:
    mine = {f"all_gather of unit {number}": Waited(20, 1.0 + number) for number in range(14)}
    theirs = {**mine, "broadcast of something": Waited(20, 10.0)}
    codes = {code: name for name in mine for code, *_ in [rows_of({name: mine[name]})[0]]}
    record = compare([rows_of(mine), rows_of(theirs)], codes, step=20, steps=20, step_s=1.0)
    assert [each.label for each in record.labels] == [f"all_gather of unit {n}" for n in range(13, 1, -1)] + ["other"]
    other = record.labels[-1]
    assert (other.waits, other.least_s, other.most_s) == (3, pytest.approx(3 / 20), pytest.approx(13 / 20))
    assert (other.least_rank, other.most_rank) == (0, 1)
    assert record.total.waits == 15
