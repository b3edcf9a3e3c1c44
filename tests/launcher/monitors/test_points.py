"""Records become scalars under DeepSpeed's names; what is not known or not finite is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dsrun.launcher.monitors.points import Point, PointReader
from support.recorded_runs import a_step, log_line, run_lines, step_line


def points_of(lines: Iterable[Mapping[str, Any]], *, with_timers: bool = False, step: int | None = None) -> list[Point]:
    reader = PointReader(with_timers=with_timers, step=step)
    return [point for line in lines for point in reader.read(line)]


def test_a_step_has_deepspeeds_names_first_and_its_samples() -> None:
    (point,) = points_of([step_line(a_step(3, loss_scale=1024.0))])
    assert (point.step, point.samples, point.after_samples) == (3, 48, None)
    assert point.values["Train/Samples/train_loss"] == a_step(3).loss
    assert point.values["Train/Samples/lr"] == 3e-4
    assert point.values["Train/Samples/loss_scale"] == 1024.0
    assert point.values["Train/Samples/seconds_forward"] == 0.014
    assert point.values["Train/Samples/memory_bytes_gpu"] == 2 << 30


def test_the_timers_of_deepspeed_come_with_wall_clock_breakdown_alone() -> None:
    (plain,), (timed,) = (points_of([step_line(a_step(1))], with_timers=timers) for timers in (False, True))
    assert not any("elapsed_time_ms" in name for name in plain.values)
    assert timed.values["Train/Samples/elapsed_time_ms_forward"] == 14.0
    assert timed.values["Train/Samples/elapsed_time_ms_backward"] == 28.0
    assert timed.values["Train/Samples/elapsed_time_ms_step"] == 5.0


def test_what_is_not_known_or_not_finite_is_left_out_and_never_0() -> None:
    short = a_step(1, loss=None, grad_norm=None, tokens_per_s=None, phases={}, memory={}, model_tflops=float("nan"))
    (point, told) = points_of([step_line(short), log_line({"eval/loss": None, "eval/f1": 0.5}, step=1)])
    assert not {"train_loss", "grad_norm", "tokens_per_s", "model_tflops"} & {
        name.rpartition("/")[2] for name in point.values
    }
    assert dict(told.values) == {"eval/f1": 0.5}
    assert points_of([log_line({"eval/loss": None}, step=1)]) == []


def test_rates_of_further_groups_have_their_number() -> None:
    (point,) = points_of([step_line(a_step(1, lrs=(3e-4, 1e-5)))])
    assert point.values["Train/Samples/lr"] == 3e-4
    assert point.values["Train/Samples/lr_group1"] == 1e-5


def test_steps_that_are_taken_again_say_up_to_where_older_points_count() -> None:
    points = points_of([*run_lines(range(1, 6)), *run_lines(range(4, 8))])
    assert [(point.step, point.after_samples) for point in points if point.after_samples is not None] == [(4, 63)]
    (again,) = points_of([step_line(a_step(4))], step=5)
    assert again.after_samples == 63


def test_steps_of_another_engine_are_not_mixed_into_those_of_the_first() -> None:
    reader = PointReader(with_timers=False)
    lines = [line | {"engine": at % 2} for at, line in enumerate(map(step_line, map(a_step, (1, 1, 2, 2))))]
    assert [point.step for line in lines for point in reader.read(line)] == [1, 2]
    assert reader.engines == 2


def test_records_of_other_events_and_other_versions_are_passed_over() -> None:
    reader = PointReader(with_timers=False)
    lines: list[dict[str, Any]] = [{"event": "later"}, {"event": "step", "step": 1}, {"event": "log", "values": 3}]
    assert [point for line in lines for point in reader.read(line)] == []
    assert reader.take_unread() == 2


def test_a_number_that_no_float_holds_is_passed_over_and_ends_nothing() -> None:
    reader = PointReader(with_timers=False)
    assert [*reader.read(log_line({"eval/huge": 10**400}, step=1))] == []
    assert reader.take_unread() == 1
