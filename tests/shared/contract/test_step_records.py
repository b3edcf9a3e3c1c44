"""Records of steps: what is written is read, and each field is explained."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dsrun.contract.step_records import (
    PHASES,
    LogRecord,
    StepRecord,
    log_fields,
    read_log,
    read_spread,
    read_step,
    spread_fields,
    step_fields,
)
from support.recorded_runs import a_spread, a_step

PAGE = (Path(__file__).parents[3] / "docs" / "internals" / "records.md").read_text()


def test_a_step_is_read_as_it_was_written_and_what_is_not_known_is_left_out() -> None:
    full = a_step(7, lrs=(1e-3, 1e-4), non_finite="head.weight", mfu=0.41, waits_s=0.25)
    written = step_fields(full)
    assert "time" not in written
    assert read_step({**written, "time": full.time, "a later field": 1}) == full
    bare = StepRecord(step=1, time=5.0, seconds=0.5, samples=2, lr=0.0, applied=False)
    assert step_fields(bare).keys() == {"step", "seconds", "samples", "lr", "applied", "grad_norm", "memory_bytes"}
    assert read_step({**step_fields(bare), "time": 5.0}) == bare


def test_a_loss_that_is_not_finite_is_written_and_an_unknown_one_is_not() -> None:
    assert "loss" in step_fields(a_step(1, loss=float("nan")))
    assert "loss" not in step_fields(a_step(1, loss=None))


def test_a_step_that_lacks_a_field_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="seconds"):
        read_step({"step": 1, "time": 1.0, "samples": 1, "lr": 0.1, "applied": True})


def test_comparisons_and_figures_of_the_script_are_read_as_they_were_written() -> None:
    assert read_spread(spread_fields(a_spread(20))) == a_spread(20)
    record = LogRecord(step=3, time=9.0, values={"eval/loss": 2.5, "off": None}, samples=48)
    assert read_log({"time": 9.0, **log_fields(record)}) == record


def test_the_page_of_records_explains_every_field_and_phase() -> None:
    names = [each.name for each in fields(StepRecord) if each.name != "time"]
    assert [name for name in (*names, *PHASES) if f"`{name}`" not in PAGE] == []
