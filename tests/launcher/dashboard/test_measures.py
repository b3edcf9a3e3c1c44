from __future__ import annotations

import pytest

from dsrun.launcher.dashboard.measures import (
    TierUse,
    eta_s,
    loss_trend,
    median_of,
    memory_use,
    phase_seconds,
    rate_median,
    step_seconds,
)
from support.recorded_runs import a_step


def test_the_rest_of_the_run_takes_as_long_as_the_median_of_the_last_steps() -> None:
    steps = [a_step(step, total_steps=1000, seconds=60.0 if step % 10 == 0 else 0.5) for step in range(1, 101)]
    assert step_seconds(steps) == 0.5
    assert eta_s(steps) == 450
    assert eta_s([a_step(1)]) is None, "nothing says how many there are"
    assert eta_s([]) is None
    assert eta_s([a_step(12, total_steps=10)]) == 0


@pytest.mark.parametrize(("slope", "word"), [(-0.01, "falling"), (0.01, "rising"), (0.0, "level")])
def test_the_loss_goes_where_its_means_go(slope: float, word: str) -> None:
    trend = loss_trend([a_step(step, loss=4.0 + slope * step) for step in range(1, 101)])
    assert trend.word == word
    assert trend.smoothed == pytest.approx(4 + slope * 75.5)


def test_what_is_not_known_of_the_loss_is_none() -> None:
    assert loss_trend([]).smoothed is None
    short = loss_trend([a_step(1), a_step(2, loss=None)])
    assert (short.last, short.change, short.word) == (None, None, "")
    assert short.smoothed == a_step(1).loss


def test_figures_are_taken_from_the_steps_that_have_them() -> None:
    assert median_of([a_step(1), a_step(2, mfu=0.4), a_step(3, mfu=0.5), a_step(4, mfu=0.6)], "mfu") == 0.5
    assert median_of([a_step(1)], "mfu") is None
    assert rate_median([a_step(1), a_step(2)]) == a_step(1).tokens_per_s
    assert rate_median([a_step(1, tokens_per_s=None), a_step(2, tokens_per_s=None)]) == 16 / 0.05
    assert rate_median([a_step(1, tokens_per_s=None)]) is None


def test_a_phase_is_a_median_but_what_is_rare_is_a_mean_and_what_takes_nothing_is_left_out() -> None:
    steps = [
        a_step(step, phases={"data": 0.0, "forward": step * 0.1, "save": 10.0 if step == 2 else 0.0})
        for step in range(1, 6)
    ]
    assert phase_seconds(steps) == {"forward": pytest.approx(0.3), "save": 2.0}
    assert phase_seconds([a_step(1, phases={})]) == {}


def test_memory_is_that_of_the_rank_that_has_most() -> None:
    step = a_step(1, memory={"gpu": 100, "cpu": 50, "disk": 0})
    assert memory_use(step, {"gpu": (300.0, 3), "cpu": (20.0, 1)}) == [TierUse("gpu", 300.0, 3), TierUse("cpu", 50, 0)]
    assert memory_use(a_step(1, memory={}, memory_bytes=7), {}) == [TierUse("device", 7, 0)]
    assert memory_use(a_step(1, memory={}, memory_bytes=0), {}) == []
