"""Figures of a run at a glance: time that failures took."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dsrun.launcher.records.recorded_run import RecordedRun
from dsrun.launcher.web_report.run_figures import figures_of
from support.recorded_runs import STEP_S, a_step, run_lines, step_line


def taken(lines: list[dict[str, Any]]) -> RecordedRun:
    run = RecordedRun()
    run.take(lines)
    return run


def test_time_that_a_failure_took_is_counted_from_the_last_step_that_was_kept() -> None:
    again = [{**line, "time": line["time"] + 90} for line in run_lines(range(51, 81))]
    assert figures_of(taken([*run_lines(range(1, 61)), *again])).lost_s == pytest.approx(90 + STEP_S - STEP_S, abs=0.01)


def test_an_attempt_of_which_nothing_was_kept_is_lost_from_its_start() -> None:
    again = [{**line, "time": line["time"] + 90} for line in run_lines(range(1, 31))]
    run = taken([*run_lines(range(1, 61)), *again])
    assert figures_of(run).lost_s == pytest.approx(90, abs=0.01)
    assert [math.isnan(gap.kept_time) for gap in run.gaps] == [True]
    assert figures_of(run).whole_s == pytest.approx(90 + 30 * STEP_S, abs=0.01), "what is lost is a part of it"


def test_a_step_without_padding_counts_as_one_that_has_none() -> None:
    padded = step_line(a_step(1, tokens=500, tokens_padded=1000))
    run = taken([padded, *(step_line(a_step(step, tokens=1000)) for step in range(2, 11))])
    assert figures_of(run).padding == pytest.approx(500 / 10_000)
    assert math.isnan(figures_of(taken([step_line(a_step(1, tokens=None))])).padding)
