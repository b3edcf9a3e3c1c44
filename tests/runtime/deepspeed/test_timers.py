"""Timers measure between start and stop, say it as DeepSpeed's do, and refuse to be used the wrong way round."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.deepspeed import timers
from dsrun.runtime.deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean


def test_times_add_up_until_they_are_reset() -> None:
    group = SynchronizedWallClockTimer()
    assert not group.has_timer("fwd")
    timer = group(timers.FORWARD_GLOBAL_TIMER)
    assert group("fwd") is timer
    assert group.has_timer("fwd")
    assert set(group.get_timers()) == {"fwd"}
    for _ in range(2):
        timer.start()
        timer.stop()
    first = timer.elapsed(reset=False)
    assert first > 0
    assert timer.elapsed_records is not None
    assert first == sum(timer.elapsed_records)
    assert len(timer.event_timers) == 2
    timer.start()
    assert timer.elapsed() > first
    assert timer.started_
    timer.stop()
    timer.reset()
    assert timer.elapsed() == 0


def test_a_timer_is_started_and_stopped_in_turn() -> None:
    timer = SynchronizedWallClockTimer.Timer("step")
    with pytest.raises(AssertionError, match="timer 'step': it has not been started"):
        timer.stop()
    timer.start()
    with pytest.raises(ModelError, match="timer 'step': it has been started"):
        timer.start()


def test_times_are_said_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    group = SynchronizedWallClockTimer()
    group("fwd").start()
    group("fwd").stop()
    time_ms = group("fwd").elapsed(reset=False)
    assert group.get_mean(["fwd", "bwd"], normalizer=2.0) == {"fwd": pytest.approx(time_ms * 500)}
    group.log(["fwd", "bwd"], normalizer=1.0)
    group.log(["fwd"], ranks=[3])
    assert capsys.readouterr().out == f"[Rank 0] time (ms) | fwd: {time_ms:.2f}\n"
    assert group("fwd").elapsed() == 0
    with pytest.raises(ModelError, match="normalizer is 0"):
        group.log(["fwd"], normalizer=0)
    said = SynchronizedWallClockTimer.memory_usage()
    pattern = (
        r" \| mem_allocated: [\d.]+ GB \| max_mem_allocated: .* \| cache_allocated: .* \| max_cache_allocated: .* GB"
    )
    assert re.fullmatch(pattern, said)


def test_a_timer_that_does_nothing_has_the_same_calls() -> None:
    group = NoopTimer()
    timer = group("fwd")
    timer.start()
    timer.stop(record=True)
    timer.reset()
    assert (timer.elapsed(reset=True), timer.mean(), group.get_timers()) == (0, 0, {})
    assert group.log(["fwd"]) is group.get_mean(["fwd"])


def test_samples_a_second_are_those_of_the_steps_that_count() -> None:
    said: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = ThroughputTimer(config, 8, start_step=1, steps_per_output=3, monitor_memory=True, logging_fn=said.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    timer.update_epoch_count()
    for step in range(3):
        for micro_step in range(2):
            timer.start()
            timer.stop(global_step=micro_step == 1)
        assert (timer.total_elapsed_time > 0) == (step > 0)
    assert (timer.global_step_count, timer.micro_step_count, timer.epoch_count) == (3, 6, 1)
    assert timer.avg_samples_per_sec() == pytest.approx(8 * 2 / timer.total_elapsed_time)
    assert [line.split(",")[0] for line in said] == ["epoch=1/micro_step=6/global_step=3"] * 2
    assert "RunningAvgSamplesPerSec=" in said[0]
    assert "vm %:" in said[1]


def test_samples_are_not_measured_where_that_is_off() -> None:
    timer = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), None, logging_fn=print)
    timer.start()
    timer.stop(global_step=True)
    assert (timer.batch_size, timer.global_step_count) == (1, 0)


def test_a_trimmed_mean_leaves_the_ends_out() -> None:
    data = [100.0, 1.0, 2.0, 3.0, -50.0]
    assert trim_mean(data, 0.2) == 2.0
    assert data[0] == 100.0
    assert trim_mean([], 0.1) == 0
    assert trim_mean([4.0], 0.1) == 4.0
    with pytest.raises(ModelError, match="trim_percent"):
        trim_mean(data, 0.6)


def test_a_function_with_a_range_is_the_same_function() -> None:
    @timers.instrument_w_nvtx
    def twice(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        """Doubles."""
        return x * times

    assert twice(torch.ones(1), times=3).item() == 3
    assert (twice.__name__, twice.__doc__) == ("twice", "Doubles.")

    @timers.instrument_w_nvtx
    def fails() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        fails()


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.2)
def test_a_gpus_work_is_measured() -> None:
    timer = SynchronizedWallClockTimer()("work")
    assert not timer.use_host_timer
    x = torch.ones(2048, 2048, device="cuda")
    timer.start()
    for _ in range(20):
        x = x @ x
    timer.stop()
    assert timer.elapsed(reset=False) > 0.1
    assert timer.mean() > 0.1
