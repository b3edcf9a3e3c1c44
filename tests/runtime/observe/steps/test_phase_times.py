"""Seconds by phase, by a clock and by marks of a device's stream."""

from __future__ import annotations

import pytest

from dsrun.runtime.observe.steps.phase_times import PhaseTimes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_phases_follow_each_other_and_add_up_to_the_step() -> None:
    clock = Clock()
    times = PhaseTimes(clock=clock)
    for said, seconds in (
        ("data", 1),
        ("script", 2),
        ("forward of micro batch 3 of chunk 1", 4),
        ("weight grads of micro batch 3 of chunk 1", 8),
        ("backward", 16),
        ("my own word", 32),
        ("save checkpoint", 64),
        ("step", 128),
    ):
        times.enter(said)
        clock.now_s += seconds
    assert times.take_step() == {
        "script": 34,
        "data": 1,
        "forward": 4,
        "backward": 24,
        "save": 64,
        "step": 128,
    }
    clock.now_s += 5
    assert times.take_step() == {"step": 5}, "a phase goes on over the end of a step"


class Stream:
    """A device that has come to some of the marks."""

    def __init__(self) -> None:
        self.queued_ms = self.done_ms = 0.0
        self.made = 0

    def make(self) -> StreamMark:
        self.made += 1
        return StreamMark(self)


class StreamMark:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = self.stream.queued_ms

    def query(self) -> bool:
        return self.stream.done_ms >= self.at_ms

    def elapsed_time(self, end_event: StreamMark) -> float:
        assert end_event.query()
        return end_event.at_ms - self.at_ms


def test_on_a_device_what_it_has_not_come_to_counts_in_the_next_step() -> None:
    stream = Stream()
    times = PhaseTimes(stream.make, is_capturing=lambda: False)
    assert times.take_step() == {}, "the first mark"
    taken: list[dict[str, float]] = []
    for _ in range(3):
        for said, milliseconds in (("forward", 10), ("backward", 20), ("step", 5)):
            times.enter(said)
            stream.done_ms = stream.queued_ms  # the norm's read waits for what was queued before
            stream.queued_ms += milliseconds
        taken.append(times.take_step())
        times.enter("script")
    assert taken[0] == pytest.approx({"script": 0.0, "forward": 0.01, "backward": 0.02})
    assert taken[1] == taken[2] == pytest.approx({"step": 0.005, "forward": 0.01, "backward": 0.02, "script": 0.0})
    assert stream.made <= 6, "marks are used again"


def test_a_long_evaluation_between_two_steps_is_told_apart_to_its_end() -> None:
    stream = Stream()
    times = PhaseTimes(stream.make, is_capturing=lambda: False)
    for _ in range(3000):
        for said in ("data", "evaluate"):
            times.enter(said)
            stream.queued_ms += 1
            stream.done_ms = stream.queued_ms
    times.enter("script")
    assert times.take_step() == pytest.approx({"data": 3.0, "evaluate": 3.0})


def test_nothing_is_marked_while_a_stream_is_captured() -> None:
    stream = Stream()
    times = PhaseTimes(stream.make, is_capturing=lambda: True)
    times.enter("forward")
    times.enter("backward")
    assert stream.made == 0
