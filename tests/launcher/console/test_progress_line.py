"""The line says what the newest step says, and no more than it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.console.progress_line import ProgressLine, RecordTail


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 2.3125, "seconds": 0.5, **fields}


def line_of(*records: dict[str, Any]) -> str:
    line = ProgressLine()
    for record in records:
        line.take(record)
    return line.text()


def test_all_that_the_runtime_knows() -> None:
    record = step(
        120, total_steps=1000, tokens_per_s=14_200, model_tflops=31.04, memory_bytes=61.3 * 2**30, seconds=0.823
    )
    assert line_of(record) == "step 120/1000  loss 2.312  14.2k tokens/s  31 TFLOP/s  61.3 GiB  ETA 12m 4s"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (step(3), "step 3  loss 2.312"),
        (step(3, loss=None), "step 3  loss not finite"),
        ({"event": "step", "step": 3}, "step 3"),
        (step(5, total_steps=5), "step 5/5  loss 2.312"),
        (step(4, total_steps=5, seconds=None), "step 4/5  loss 2.312"),
        ({"event": "plan", "step": 3}, ""),
        (step(3, engine=1), ""),
        ({"event": "step"}, ""),
        ({"event": "step", "step": "3"}, ""),
    ],
)
def test_what_is_not_known_is_left_out(record: dict[str, Any], text: str) -> None:
    assert line_of(record) == text


def test_the_time_left_follows_the_last_steps() -> None:
    slow = [step(number, seconds=60.0, total_steps=100) for number in range(1, 11)]
    fast = [step(number, seconds=1.0, total_steps=100) for number in range(11, 41)]
    assert line_of(*slow, *fast).endswith("ETA 1m 0s")


def test_a_job_that_began_anew_forgets_how_long_steps_took_before() -> None:
    before = [step(number, seconds=60.0, total_steps=100) for number in range(1, 11)]
    assert line_of(*before, step(5, seconds=1.0, total_steps=100)).endswith("ETA 1m 35s")


def test_records_are_read_as_they_come_and_a_torn_one_waits(tmp_path: Path) -> None:
    tail, path = RecordTail(tmp_path), tmp_path / "records.jsonl"
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ep": 2}\nno json\n[3]\n{"step": 4}\n')
    assert tail.read() == [{"step": 2}, {"step": 4}]


def test_of_many_records_the_newest_are_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"step": number}) + "\n" for number in range(50_000)))
    tail = RecordTail(tmp_path)
    assert tail.read()[-1] == {"step": 49_999}
    with path.open("a") as file:
        file.write('{"step": 50000}\n')
    assert tail.read() == [{"step": 50_000}]
