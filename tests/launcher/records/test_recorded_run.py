"""Records as columns of numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.records.recorded_run import Columns, RecordedRun, Rewind, read_run
from support.recorded_runs import BEGIN_S, STEP_S, a_step, append_records, log_line, run_lines, start_line, step_line


def taken(lines: list[dict[str, Any]]) -> RecordedRun:
    run = RecordedRun()
    run.take(lines)
    return run


def restarted() -> list[dict[str, Any]]:
    """Sixty steps, of which the last ten are taken again, ninety seconds later."""
    later = [{**line, "time": line["time"] + 90} for line in run_lines(range(51, 81))]
    return [*run_lines(range(1, 61)), log_line({"accuracy": 0.5}, step=60), *later]


def test_a_run_has_what_was_written(tmp_path: Path) -> None:
    append_records(tmp_path, [*run_lines(range(1, 51)), log_line({"eval/loss": 2.5, "nan": None}, step=50)])
    run = read_run(tmp_path)
    assert [each["world_size"] for each in run.starts] == [4]
    assert list(run.steps["step"]) == list(range(1, 51))
    assert list(run.steps["loss"]) == [a_step(step).loss for step in range(1, 51)]
    assert list(run.steps["phases.forward"]) == [a_step(1).phases["forward"]] * 50
    assert list(run.spreads["step"]) == list(run.waits["step"]) == [20, 40]
    assert list(run.spreads["forward.most_rank"]) == [2, 2]
    assert [each["step"] for each in run.checkpoints] == [50]
    assert list(run.figures["eval/loss"]["value"]) == [2.5]
    assert math.isnan(run.figures["nan"]["value"][0])
    assert (run.rewinds, run.unread, run.engines) == ([], 0, 1)


def test_steps_that_are_taken_again_count_once() -> None:
    run = taken(restarted())
    assert list(run.steps["step"]) == list(range(1, 81))
    last_kept, first_again = (BEGIN_S + STEP_S * step for step in (50, 51))
    assert list(run.steps["time"])[49:51] == [last_kept, first_again + 90]
    assert run.rewinds == [Rewind(step=51, steps=10, time=first_again + 90)]
    assert list(run.spreads["step"]) == list(run.waits["step"]) == [20, 40, 60, 80]
    assert len(run.figures["accuracy"]) == 0, "what was told of steps that do not count"
    assert [each["step"] for each in run.checkpoints] == [50]
    assert len(run.starts) == 2


def test_steps_of_another_engine_of_the_process_are_kept_apart() -> None:
    run = taken([step_line(a_step(1)), {**step_line(a_step(1)), "engine": 1}, step_line(a_step(2))])
    assert (list(run.steps["step"]), run.engines, run.rewinds) == ([1, 2], 2, [])


def test_what_a_step_lacks_is_not_known() -> None:
    run = taken([step_line(a_step(1, loss=None, phases={})), step_line(a_step(2, tokens_per_s=None))])
    assert math.isnan(run.steps["loss"][0])
    assert run.steps["loss"][1] > 0
    assert math.isnan(run.steps["phases.data"][0])
    assert math.isnan(run.steps["tokens_per_s"][1])
    assert not run.steps.has("loss_scale")


@pytest.mark.parametrize(
    "torn",
    [
        {"event": "step", "step": 3},
        {**step_line(a_step(3)), "seconds": "0.05"},
        {**step_line(a_step(3)), "time": math.inf},
        {**step_line(a_step(3)), "loss": 10**400},
        {**step_line(a_step(3)), "phases": [0.1]},
        {"event": "spread", "step": 20, "seconds": {"data": None}},
        {"event": "log", "step": 20, "time": 1.0, "values": {"accuracy": "high"}},
    ],
    ids=["short", "text", "infinite", "huge", "list", "spread", "log"],
)
def test_a_record_of_another_kind_is_counted_and_passed_over(torn: dict[str, Any]) -> None:
    run = taken([step_line(a_step(1)), step_line(a_step(2)), torn, step_line(a_step(4))])
    assert run.unread == 1
    assert list(run.steps["step"]) == [1, 2, 4]
    assert len(run.steps["loss"]) == 3
    assert run.steps["loss"][2] == a_step(4).loss


def test_half_a_line_is_passed_over(tmp_path: Path) -> None:
    append_records(tmp_path, [start_line(), step_line(a_step(1))])
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"event": "st\n{"event": "step", "st')
    assert len(read_run(tmp_path).steps) == 1
    assert len(read_run(tmp_path / "nowhere").steps) == 0


def test_a_step_takes_eight_bytes_a_figure() -> None:
    columns = Columns()
    for at in range(1000):
        columns.append({"step": float(at)} if at else {"step": 0.0, "loss": 1.0})
    assert columns["loss"][0] == 1.0
    assert len(columns["loss"]) == 1000
    columns.cut(0)
    assert len(columns["step"]) == 0
