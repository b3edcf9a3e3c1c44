from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.dashboard.run_figures import MOST_LOGGED, RECENT_STEPS, RunFigures
from dsrun.launcher.dashboard.thin_curve import MOST_POINTS
from support.recorded_runs import a_step, append_records, log_line, run_lines, start_line, step_line


def test_a_job_without_records_has_no_figures_and_gets_them_as_they_come(tmp_path: Path) -> None:
    figures = RunFigures(tmp_path)
    assert not figures.read()
    assert figures.is_complete
    assert figures.last is None
    append_records(tmp_path, run_lines(range(1, 61)))
    assert figures.read()
    assert figures.last == a_step(60)
    assert figures.spread is not None
    assert figures.waits is not None
    assert figures.checkpoint is not None
    assert figures.checkpoint["tag"] == "step50"
    assert figures.traffic == {"data": 60 * 25_000_000}
    assert not figures.read(), "nothing is new"


def test_a_long_run_keeps_its_last_steps_and_a_thin_curve_of_all(tmp_path: Path) -> None:
    append_records(tmp_path, [step_line(a_step(step, traffic={}, phases={})) for step in range(1, 5001)])
    figures = RunFigures(tmp_path)
    figures.read()
    assert len(figures.recent) == RECENT_STEPS
    assert len(figures.loss.points()) <= MOST_POINTS
    assert figures.loss.points()[0][0] <= 2
    assert figures.loss.points()[-1][0] >= 4990


def test_a_long_file_is_read_a_piece_at_a_time_and_says_how_much_of_it_was(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 501)))
    seconds = itertools.count()
    figures = RunFigures(tmp_path, clock=lambda: float(next(seconds)))
    figures.read(budget_s=0.5)
    assert not figures.is_complete
    assert 0 < figures.share_read < 1
    pieces = 1
    while not figures.is_complete:
        figures.read(budget_s=0.5)
        pieces += 1
    assert pieces > 5
    assert figures.share_read == 1
    assert figures.last is not None
    assert figures.last.step == 500


def test_steps_that_are_taken_again_count_as_they_were_taken_last(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 101)))
    append_records(tmp_path, [step_line(a_step(101, applied=False)), log_line({"reward": 1.0}, step=101)])
    figures = RunFigures(tmp_path)
    figures.read()
    assert (figures.skipped, figures.lost_steps, list(figures.logged)) == (1, 0, ["reward"])
    append_records(tmp_path, [start_line(), *(step_line(a_step(step, loss=1.0)) for step in range(51, 61))])
    figures.read()
    assert (figures.skipped, figures.lost_steps, figures.logged) == (0, 51, {})
    assert [step.step for step in figures.recent] == list(range(1, 61))
    assert figures.loss.points()[-1] == (60, 1.0)
    assert figures.spread is None, "the ranks are other processes"


def test_a_loss_that_is_not_finite_has_no_point_and_samples_stand_for_tokens(tmp_path: Path) -> None:
    steps = [a_step(1, loss=None, tokens_per_s=None), a_step(2, tokens_per_s=None)]
    append_records(tmp_path, map(step_line, steps))
    figures = RunFigures(tmp_path)
    figures.read()
    assert [step for step, _ in figures.loss.points()] == [2]
    assert figures.rate.points() == [(2, 16 / steps[1].seconds)]


def test_names_without_end_are_no_memory_without_end(tmp_path: Path) -> None:
    append_records(tmp_path, [log_line({f"figure{number}": 1.0}, step=1) for number in range(MOST_LOGGED + 5)])
    append_records(tmp_path, [log_line({"figure10": 2.0}, step=2)])
    figures = RunFigures(tmp_path)
    figures.read()
    assert len(figures.logged) == MOST_LOGGED
    assert list(figures.logged)[-1] == "figure10", "the newest is last"
    assert "figure0" not in figures.logged


def test_records_of_another_version_are_counted_and_passed_over(tmp_path: Path) -> None:
    with JobPaths(tmp_path).records.open("w") as file:
        file.write('{"event": "step", "step": 1}\nno json\n{"event": "news"}\n')
    append_records(tmp_path, [step_line(a_step(2))])
    figures = RunFigures(tmp_path)
    figures.read()
    assert (figures.unread, len(figures.recent)) == (1, 1)


@pytest.mark.parametrize(
    "damaged",
    [
        {**step_line(a_step(3)), "step": "3"},
        {**step_line(a_step(3)), "time": math.inf},
        {**step_line(a_step(3)), "loss": "2"},
        {**step_line(a_step(3)), "traffic": [1]},
        log_line({"reward": 10**400}, step=2),
        log_line({"reward": "high"}, step=2),  # type: ignore[dict-item]
    ],
)
def test_a_damaged_record_is_counted_and_ends_no_page(tmp_path: Path, damaged: dict[str, Any]) -> None:
    append_records(tmp_path, [step_line(a_step(2)), damaged])
    figures = RunFigures(tmp_path)
    figures.read()
    assert (figures.unread, [each.step for each in figures.recent], figures.logged) == (1, [2], {})


def test_a_loss_beyond_what_can_be_drawn_has_no_point(tmp_path: Path) -> None:
    append_records(tmp_path, [step_line(a_step(step, loss=(-1) ** step * 1.7e308)) for step in (1, 2)])
    figures = RunFigures(tmp_path)
    figures.read()
    assert (figures.loss.points(), figures.last) == ([], a_step(2, loss=1.7e308))


def test_of_several_engines_in_one_script_the_first_one_counts(tmp_path: Path) -> None:
    lines = [step_line(a_step(1)), {**step_line(a_step(1, loss=9.0)), "engine": 1}, step_line(a_step(2))]
    append_records(tmp_path, [*lines, {**log_line({"critic": 1.0}, step=2), "engine": 1}])
    figures = RunFigures(tmp_path)
    figures.read()
    assert (figures.engines, figures.lost_steps, figures.logged) == (2, 0, {})
    assert figures.recent == [a_step(1), a_step(2)]
