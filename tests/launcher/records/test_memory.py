"""Records of memory of a job: those of its last attempt, whatever else stands in the file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dsrun.launcher.records.memory import read_memory_records
from dsrun.memory_use.findings import growth_of
from dsrun.memory_use.samples import MemorySample, TierUse, to_record
from dsrun.memory_use.stacks import StacksAtPeak, StackUse, stacks_record

USE = TierUse(tier="cpu", held_bytes=9, peak_bytes=9, live_bytes=1, reserved_bytes=2, kinds=(("masters", 5),))
FIRST, SECOND = (MemorySample(step=step, phase="start", tiers=(USE,)) for step in (1, 2))
STACKS = StacksAtPeak(peak_bytes=9, before_bytes=4, stacks=(StackUse(nbytes=5, count=1, frames=("a.py:1 f",)),))
GROWTH = growth_of("cpu", [(10, 0), (60, 50)])


def line(event: str, **fields: object) -> str:
    return json.dumps({"event": event, "time": 1.5, **fields}) + "\n"


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    assert read_memory_records(tmp_path) is None


def test_the_last_attempts_records_are_read_and_half_a_line_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(
        line("start", stage=1)
        + line("memory_sample", **to_record(FIRST))
        + line("memory", state_predicted_bytes=1, state_bytes=2)
        + line("start", stage=1)
        + line("step", step=1, memory_bytes=7)
        + line("memory_sample", **to_record(SECOND))
        + line("memory_growth", **asdict(GROWTH))
        + line("memory_history", **stacks_record(STACKS))
        + line("memory_sample", **to_record(SECOND))[:40]
    )
    records = read_memory_records(tmp_path)
    assert records is not None
    assert (records.samples, records.growths, records.state) == ((SECOND,), (GROWTH,), None)
    assert records.stacks == STACKS


def test_a_run_that_has_ended_tells_its_state(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(line("memory", state_predicted_bytes=1, state_bytes=2))
    records = read_memory_records(tmp_path)
    assert records is not None
    assert records.state == (1, 2)
