"""Which moments are sampled, what is written of them, and when a leak is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.memory_use.samples import from_record
from dsrun.memory_use.stacks import StacksAtPeak, stacks_from_record
from dsrun.runtime.observe.allocation_history import AllocationHistory
from dsrun.runtime.observe.memory_watch import MemoryWatch, is_sampled
from dsrun.runtime.observe.records import RecordWriter

MIB = 1 << 20


def kinds() -> tuple[tuple[str, int], ...]:
    return (("parameters", 7),)


def run(watch: MemoryWatch, steps: range, *, micro_steps: int = 1, keep: list[Tensor] | None = None) -> None:
    for step in steps:
        for _ in range(micro_steps):
            watch.begin_forward(step, kinds)
            watch.begin_backward(kinds)
            watch.end_backward(kinds)
        if keep is not None:
            keep.append(torch.empty(MIB, dtype=torch.uint8))
        watch.end_step(step, kinds)


def make(records: RecordWriter | None = None, *, rank: int = 0) -> MemoryWatch:
    return MemoryWatch(records or RecordWriter(None), rank=rank, device=torch.device("cpu"))


def read(writer: RecordWriter, path: Path, event: str) -> list[dict[str, Any]]:
    writer.flush()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["event"] == event]


def test_few_steps_are_sampled() -> None:
    assert [step for step in range(1, 1_000_001) if is_sampled(step)] == [1, 2, 3, *(10**n for n in range(1, 7))]


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_four_moments_of_a_sampled_steps_first_micro_step_are_recorded(tmp_path: Path, micro_steps: int) -> None:
    path = tmp_path / "records.jsonl"
    records = RecordWriter(path)
    watch = make(records)
    run(watch, range(3, 6), micro_steps=micro_steps)
    assert [(s.step, s.phase) for s in watch.samples] == [
        (3, phase) for phase in ("start", "forward", "backward", "update")
    ]
    assert tuple(from_record(r) for r in read(records, path, "memory_sample")) == watch.samples
    assert watch.samples[0].tiers[0].kinds == (("parameters", 7),)


def test_a_peak_that_rises_between_samples_has_its_next_step_sampled() -> None:
    watch = make()
    run(watch, range(10, 15))
    use = watch.samples[-1].tiers[0]
    held = torch.ones(use.peak_bytes - use.held_bytes + use.peak_bytes // 8, dtype=torch.int8)
    run(watch, range(15, 25))
    del held
    assert [sample.step for sample in watch.samples if sample.phase == "start"] == [10, 16]


def test_between_sampled_steps_kinds_are_not_asked_for() -> None:
    def fail() -> tuple[tuple[str, int], ...]:
        raise AssertionError("asked")

    watch = make()
    watch.begin_forward(4, fail)
    watch.begin_backward(fail)
    watch.end_backward(fail)
    watch.end_step(4, fail)
    assert watch.samples == ()


def test_other_ranks_sample_and_write_nothing(tmp_path: Path) -> None:
    records = RecordWriter(tmp_path / "records.jsonl")
    watch = make(records, rank=1)
    run(watch, range(1, 2))
    records.flush()
    assert len(watch.samples) == 4
    assert not (tmp_path / "records.jsonl").exists()


def test_a_full_disk_ends_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    records = RecordWriter(Path("/dev/full"))
    run(make(records), range(1, 3))
    records.flush()
    assert capsys.readouterr().out == "dsrun: records: /dev/full: No space left on device; steps are not recorded\n"


def test_what_each_step_keeps_is_told_once_with_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    records = RecordWriter(path)
    watch, kept = make(records), list[Tensor]()
    run(watch, range(1, 76), keep=kept)
    (growth,) = watch.growths
    assert growth.is_leak
    assert growth.bytes_per_step == pytest.approx(MIB, rel=0.05)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert said.startswith("dsrun: memory: host growth +1.0 MiB a step over 50 steps up to 60: a leak; look for ")
    assert read(records, path, "memory_growth")[0]["step"] == 60


def test_a_run_that_keeps_nothing_has_no_leak(capsys: pytest.CaptureFixture[str]) -> None:
    watch = make()
    run(watch, range(1, 101))
    assert [growth.is_leak for growth in watch.growths] == [False]
    assert capsys.readouterr().out == ""


def test_going_back_to_an_earlier_step_starts_the_watch_anew() -> None:
    watch = make()
    run(watch, range(1, 41))
    run(watch, range(20, 61))
    assert watch.growths == ()
    run(watch, range(61, 71))
    assert [growth.steps for growth in watch.growths] == [50]


class NotedHistory(AllocationHistory):
    """Stands where torch would record."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), snapshot=None)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def finish(self) -> StacksAtPeak:
        self.calls.append("finish")
        return StacksAtPeak(peak_bytes=9, before_bytes=4, stacks=())


def test_allocations_are_recorded_over_the_first_three_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history, path = NotedHistory(), tmp_path / "records.jsonl"
    records = RecordWriter(path)
    watch = MemoryWatch(records, rank=0, device=torch.device("cpu"), history=history)
    run(watch, range(11, 13), micro_steps=2)
    assert history.calls == ["start"]
    run(watch, range(13, 19))
    assert history.calls == ["start", "finish"]
    (record,) = read(records, path, "memory_history")
    assert stacks_from_record(record).peak_bytes == 9
    assert capsys.readouterr().out.startswith("GPU peak of the recorded steps 9 B")
