"""Seconds of steps are those between updates, and what is waited inside of a wait counts once."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.runtime.engine.host.step_watch import StepWatch, TimedSteps


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Slow:
    """A step that takes a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def step(self, work: Any) -> None:
        self._clock.passes(1.0)


def test_the_first_step_warms_up_and_the_others_are_means() -> None:
    clock = Clock()
    timed = TimedSteps(Slow(clock), clock=clock)
    watch = StepWatch(timed, clock=clock)
    work: Any = None
    timed.step(work)
    for pause in (0.0, 5.0, 7.0):
        clock.passes(pause)
        watch.begins()
        with watch.waiting(), watch.waiting():
            timed.step(work)
            clock.passes(0.5)
    assert watch.steps == 2
    found = watch.observed()
    assert found.steps == 2
    assert found.seconds == pytest.approx((5.0 + 7.0) / 2 + 1.5)
    assert found.waited == pytest.approx(1.5)
    assert found.stepping == pytest.approx(1.0)
