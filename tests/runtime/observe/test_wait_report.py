"""Ranks tell each other what they wait in, every so many steps and only where the run is recorded."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.contract.wait_records import WaitRecord, from_fields
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.wait_times import Waited, WaitTimes
from dsrun.runtime.observe.wait_report import (
    STEPS_PER_RECORD,
    Exchange,
    UnrecordedExchange,
    WaitReport,
    compare,
    rows_of,
)
from support.late_collectives import LateWorld
from support.written_records import RecordsAtOnce

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
) -> list[tuple[WaitReport, int]]:
    """Returns the report and the all-gathers of each rank."""

    def body(axis: LoopbackCollectives) -> tuple[WaitReport, int]:
        waits = waits_of(axis.rank, 0)
        now_s = iter(range(1000))
        report = WaitReport(
            waits,
            axis,
            RecordsAtOnce(path if axis.rank == 0 else None),
            device=device,
            is_recorded=is_recorded,
            clock=lambda: next(now_s) / 10 * STEPS_PER_RECORD,
        )
        for number in range(1, steps + 1):
            step(waits, axis.rank)
            report.end_step(number)
        return report, axis.traffic.calls["all_gather"]

    return world.run(body)


def gathers(*args: Any, **kwargs: Any) -> list[int]:
    return [calls for _, calls in run(*args, **kwargs)]


def records(path: Path) -> list[WaitRecord]:
    read: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["event"] for record in read} == {"waits"}
    return [from_fields(record) for record in read]


def test_a_record_says_of_each_collective_how_long_ranks_waited_and_who_least_and_most(tmp_path: Path) -> None:
    assert gathers(LoopbackWorld(RANKS), tmp_path / "records", 2 * STEPS_PER_RECORD + 1) == [2] * RANKS
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


def test_messages_of_other_stages_are_one_row_though_ranks_have_other_names_for_them(tmp_path: Path) -> None:
    def body(axis: LoopbackCollectives) -> None:
        waits = WaitTimes(HeartbeatWriter(None))
        report = WaitReport(waits, axis, RecordsAtOnce(tmp_path / "records"), device=CPU, is_recorded=True)
        for number in range(STEPS_PER_RECORD + 1):
            for name in ("activations", "gradients"):
                waits.enter(f"receive of {name} for chunk {axis.rank} from rank {1 - axis.rank}", WaitKind.THREAD)
                waits.leave(0.25 * (axis.rank + 1))
            report.end_step(number)

    LoopbackWorld(2).run(body)
    (record,) = records(tmp_path / "records")[:1]
    (messages,) = (each for each in record.labels if each.label.startswith("receive"))
    assert (messages.label, messages.waits) == ("receive from other stages", 2)
    assert (messages.least_s, messages.most_s, messages.most_rank) == pytest.approx((0.5, 1.0, 1))
    assert [each.label for each in record.kinds if each.label == "receive"] == ["receive"]
    assert "other" not in [each.label for each in record.labels]


def test_the_first_step_is_not_in_a_record(tmp_path: Path) -> None:
    def body(axis: LoopbackCollectives) -> None:
        waits = WaitTimes(HeartbeatWriter(None))
        waits.enter("building", WaitKind.THREAD)
        waits.leave(100.0)
        report = WaitReport(waits, axis, RecordsAtOnce(tmp_path / "records"), device=CPU, is_recorded=True)
        for number in range(STEPS_PER_RECORD + 1):
            report.end_step(number)

    LoopbackWorld(2).run(body)
    assert records(tmp_path / "records")[0].total.most_s < 1


def test_nothing_is_exchanged_before_so_many_steps_nor_where_nothing_is_recorded(tmp_path: Path) -> None:
    assert gathers(LoopbackWorld(RANKS), tmp_path / "few", STEPS_PER_RECORD) == [0] * RANKS
    assert gathers(LoopbackWorld(RANKS), tmp_path / "none", 3 * STEPS_PER_RECORD, is_recorded=False) == [0] * RANKS
    assert not list(tmp_path.iterdir())


def test_a_lone_rank_records_nothing(tmp_path: Path) -> None:
    waits, alone = waits_of(0, 0), AloneCollectives()
    report = WaitReport(waits, alone, RecordsAtOnce(tmp_path / "records"), device=CPU, is_recorded=True)
    for number in range(3 * STEPS_PER_RECORD):
        report.end_step(number)
    assert alone.traffic.calls == {}
    assert not list(tmp_path.iterdir())


@contextmanager
def no_synchronizing() -> Generator[None]:
    """Any thread of this process that waits for the device by torch gets an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.3)
@pytest.mark.parametrize("is_last", [False, True])
def test_on_a_gpu_the_record_is_written_by_the_next_step_or_at_the_end_and_the_host_waits_for_nothing(
    tmp_path: Path, is_last: bool
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    with no_synchronizing():
        ranks = run(LateWorld(RANKS, device=device, cycles=10_000), tmp_path / "records", 21, device=device)
    assert [calls for _, calls in ranks] == [1] * RANKS
    assert not list(tmp_path.iterdir())
    torch.cuda.synchronize(device)  # as the norm's read
    if is_last:
        ranks.clear()
        gc.collect()
    else:
        with no_synchronizing():
            ranks[0][0].end_step(22)
    (record,) = records(tmp_path / "records")
    assert (record.labels[0].label, record.labels[0].least_rank) == ("reduce_scatter of unit 3", 2)


class Copied:
    """An event behind a copy to the host."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)

    def query(self) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_exchange_is_recorded_once_and_when_its_copy_has_ended(tmp_path: Path) -> None:
    rows = torch.tensor([rows_of({"barrier": Waited(1, rank)}) for rank in range(2)], dtype=torch.float64)
    last = UnrecordedExchange(RecordsAtOnce(tmp_path / "records"), rows.view(-1), size=2)
    last.record_at_end()
    last.put(Exchange(21, 20, 0.1, {float(crc32(b"barrier")): "barrier"}, Copied(False, True)))
    last.record()
    assert not list(tmp_path.iterdir())
    last.record_at_end()
    last.record()
    (record,) = records(tmp_path / "records")
    assert (record.step, record.labels[0].label, record.total.most_s) == (21, "barrier", 0.05)


def test_at_the_end_a_device_that_has_failed_is_no_further_error(tmp_path: Path) -> None:
    last = UnrecordedExchange(RecordsAtOnce(tmp_path / "records"), torch.zeros(2 * len(rows_of({})) * 3), size=2)
    last.put(Exchange(21, 20, 0.1, {}, Copied(RuntimeError("CUDA error"), RuntimeError("CUDA error"))))
    last.record_at_end()
    with pytest.raises(RuntimeError, match="CUDA error"):
        last.record()
    assert not list(tmp_path.iterdir())


def compared(*ranks: Mapping[str, float], steps: int = 1) -> WaitRecord:
    """Compares ranks that have waited once a step in each label, by its seconds a step."""
    waits = [{name: Waited(steps, seconds * steps) for name, seconds in each.items()} for each in ranks]
    names = {float(crc32(name.encode())): name for name in ranks[0]}
    rows = torch.tensor([rows_of(each) for each in waits], dtype=torch.float64)
    return compare(rows, names, step=steps, steps=steps, step_s=1.0)


def test_ranks_send_a_row_for_each_label_and_leave_out_the_same_ones_where_there_are_too_many() -> None:
    names = [f"all_gather of unit {number}" for number in range(260)]
    mine = rows_of({name: Waited(2, number / 100) for number, name in enumerate(names)})
    theirs = rows_of({name: Waited(2, -number / 100) for number, name in enumerate(names)})
    assert len(mine) == len(theirs) == len(rows_of({})) == 256
    assert [code for code, *_ in mine] == [code for code, *_ in theirs]
    assert len({code for code, *_ in mine}) == 256
    assert mine[-1][1] == 2 * 5
    assert sum(seconds for *_, seconds in mine) == pytest.approx(sum(range(260)) / 100)


def test_more_labels_than_a_screen_has_are_compared_with_all_ranks_in_each() -> None:
    """The slow rank waits least in 40 of 80 labels, all of which every rank has sent."""
    units = range(40)

    def waits(rank: int) -> dict[str, float]:
        gathers = {f"all_gather of unit {unit}": 0.003 + rank / 10_000 for unit in units}
        return gathers | {f"reduce_scatter of unit {unit}": 0.0 if rank == 2 else 0.002 for unit in units}

    record = compared(*map(waits, range(4)), steps=20)
    reduction = next(each for each in record.labels if each.label.startswith("reduce_scatter"))
    assert (reduction.least_s, reduction.median_s, reduction.least_rank) == (0, 0.002, 2)
    kinds = {each.label: each for each in record.kinds}
    assert list(kinds) == ["all_gather", "reduce_scatter"]
    assert (kinds["reduce_scatter"].median_s, kinds["reduce_scatter"].least_rank) == (0.08, 2)
    assert (kinds["all_gather"].least_s, kinds["all_gather"].most_s) == (0.12, 0.132)
    assert record.waited_s == {0: 0.2, 1: 0.204, 2: 0.128, 3: 0.212}


def test_a_label_that_a_rank_has_not_sent_is_unknown_where_it_has_more_than_it_sends() -> None:
    few = {"reduce_scatter of unit 1": 0.5}
    many = {f"all_gather of unit {number}": 0.001 for number in range(300)}
    record = compared({**few, "barrier": 0.1}, few, many)
    rows = {each.label: each for each in record.labels}
    # Rank 1 has sent all it has, so it has waited in no barrier; of rank 2 nobody knows.
    assert (rows["barrier"].least_s, rows["barrier"].median_s, rows["barrier"].least_rank) == (0, 0.05, 1)
    assert (rows["reduce_scatter of unit 1"].least_s, rows["reduce_scatter of unit 1"].least_rank) == (0.5, 0)
    assert record.kinds == ()
    assert record.waited_s == {0: 0.6, 1: 0.5, 2: 0.3}
    assert record.total.least_rank == 2


def test_of_many_ranks_those_that_wait_least_are_told_one_by_one() -> None:
    record = compared(*({"barrier": 0.1 if rank == 70 else 0.2 + rank / 1000} for rank in range(80)))
    assert record.waited_s == {rank: round(0.2 + rank / 1000, 6) for rank in range(63)} | {70: 0.1}
    assert record.ranks == 80


def test_ranks_that_have_not_waited_are_alike() -> None:
    record = compared({}, {})
    assert (record.labels, record.kinds, record.waited_s) == ((), (), {0: 0, 1: 0})
    assert record.total.most_s == 0


def test_what_rank_0_does_not_know_and_what_is_short_is_added_up() -> None:
    mine = {f"all_gather of unit {number}": 1.0 + number for number in range(14)}
    record = compared(mine, {**mine, "broadcast of something": 10.0})
    assert [each.label for each in record.labels] == [f"all_gather of unit {n}" for n in range(13, 1, -1)] + ["other"]
    other = record.labels[-1]
    assert (other.waits, other.least_s, other.most_s) == (3, 3, 13)
    assert (other.least_rank, other.most_rank) == (0, 1)
    assert record.total.waits == 15


def test_the_label_in_which_ranks_differ_most_is_among_those_that_are_shown() -> None:
    alike = {f"all_gather of unit {number}": 1.0 + number for number in range(14)}
    record = compared({**alike, "barrier": 0.5}, {**alike, "barrier": 0.0})
    assert [each.label for each in record.labels][-2:] == ["barrier", "other"]
    assert len(record.labels) == 13
