"""TensorBoard's own reader has every scalar, and none that does not count any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.monitors.state import StateFile
from support.recorded_runs import a_step, log_line, run_lines
from support.tracked_runs import give, run_to_its_end, settings_of

event_accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

BOARD = settings_of("tensorboard", output_path="out", job_name="run")


def scalars(tmp_path: Path, tag: str) -> list[tuple[int, float]]:
    reader = event_accumulator.EventAccumulator(str(tmp_path / "out" / "run"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, pytest.approx(event.value, rel=1e-6)) for event in reader.Scalars(tag)]


def losses(steps: range) -> list[tuple[int, float | None]]:
    return [(16 * step, a_step(step).loss) for step in steps]


def test_tensorboards_reader_has_every_scalar_at_its_samples(tmp_path: Path) -> None:
    lines = [*run_lines(range(1, 31)), log_line({"eval/f1": 0.5}, step=30)]
    run_to_its_end(tmp_path / "job", BOARD, [lines])
    assert scalars(tmp_path, "Train/Samples/train_loss") == losses(range(1, 31))
    assert scalars(tmp_path, "eval/f1") == [(480, 0.5)]


def test_steps_that_were_taken_again_are_there_once(tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "job", BOARD, [run_lines(range(1, 13)), run_lines(range(9, 16))])
    assert scalars(tmp_path, "Train/Samples/train_loss") == losses(range(1, 16))


def test_what_a_killed_monitor_wrote_and_did_not_write_down_is_there_once(tmp_path: Path) -> None:
    job = tmp_path / "job"
    written_down = give(job, BOARD, run_lines(range(1, 6))).state
    give(job, BOARD, run_lines(range(6, 12), first=False))
    StateFile(job, BOARD).write(written_down)
    run_to_its_end(job, BOARD, [run_lines(range(12, 15), first=False)])
    assert scalars(tmp_path, "Train/Samples/train_loss") == losses(range(1, 15))


def test_a_job_that_goes_on_and_evaluates_first_keeps_the_step_before_it(tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "job1", BOARD, [run_lines(range(1, 6))], job_id="j1")
    lines = [log_line({"eval/f1": 0.5}, step=5), *run_lines(range(6, 9))]
    run_to_its_end(tmp_path / "job2", BOARD, [lines], job_id="j2")
    assert scalars(tmp_path, "Train/Samples/train_loss") == losses(range(1, 9))
