"""Curves that are thinned and smoothed."""

from __future__ import annotations

import math

import pytest

from dsrun.launcher.web_report.axes import Axis, Unit, value_axis
from dsrun.launcher.web_report.curves import bucket_bounds, median, smoothed, thin

NAN = math.nan


def test_a_short_curve_stays_as_it_is() -> None:
    assert thin([1, 2, 3], [5.0, 4.0, 6.0]) == [[(1, 5.0), (2, 4.0), (3, 6.0)]]


@pytest.mark.parametrize("count", [2_001, 100_003])
def test_a_long_curve_has_about_two_thousand_points_and_keeps_its_spikes(count: int) -> None:
    values = [math.sin(at / 500) for at in range(count)]
    values[777], values[count - 2] = 40.0, -40.0
    (piece,) = thin(range(count), values)
    assert 1_000 <= len(piece) <= 2_002
    assert (777, 40.0) in piece
    assert (count - 2, -40.0) in piece
    assert [x for x, _ in piece] == sorted(x for x, _ in piece)


def test_a_missing_value_breaks_a_curve() -> None:
    assert thin([1, 2, 3, 4], [1.0, NAN, 3.0, math.inf]) == [[(1, 1.0)], [(3, 3.0)]]
    assert thin([1, 2], [NAN, NAN]) == []


def test_smoothing_passes_over_what_is_missing_and_is_not_late() -> None:
    steps = [10.0 - at / 10 for at in range(100)]
    assert smoothed(steps, 10)[50] == pytest.approx(steps[50], abs=0.05)
    assert smoothed([2.0, NAN, 2.0, 1e300, 2.0], 1) == pytest.approx([2.0, 2.0, 2.0, 1e300, 2.0])
    assert all(math.isnan(each) for each in smoothed([NAN, NAN], 5))


def test_buckets_cover_all_values_once() -> None:
    assert bucket_bounds(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert bucket_bounds(2, 5) == [(0, 1), (1, 2)]
    assert bucket_bounds(0, 5) == []


def test_the_middle_leaves_out_what_is_missing() -> None:
    assert median([3.0, NAN, 1.0]) == 2.0
    assert math.isnan(median([NAN]))


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (Axis(0, 10), ["0", "2", "4", "6", "8", "10"]),
        (Axis(0, 3 * 2**30, Unit.BYTES), ["0 B", "512.0 MiB", "1.0 GiB", "1.5 GiB", "2.0 GiB", "2.5 GiB", "3.0 GiB"]),
        (Axis(0, 1500, Unit.SECONDS), ["0", "5m", "10m", "15m", "20m", "25m"]),
        (Axis(0.01, 1000, is_log=True), ["0.01", "0.1", "1", "10", "100", "1000"]),
    ],
)
def test_ticks_stand_at_round_values(axis: Axis, texts: list[str]) -> None:
    ticks = axis.ticks()
    assert [text for _, text in ticks] == texts
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in ticks)


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0], [-3.0, -3.0], [1e-300], [1e300, -1e300], [1.7e308, -1.7e308], [1e-320, 1.0], [1.0, 1.0 + 1e-15]],
)
def test_any_values_have_an_axis(values: list[float]) -> None:
    axis = value_axis(values, Unit.NUMBER, may_be_log=True)
    assert axis.low < axis.high
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert len(axis.ticks()) < 20


def test_values_that_differ_by_rounding_alone_are_a_line_in_the_middle() -> None:
    axis = value_axis([3.0, 3.0000000000000004], Unit.NUMBER)
    assert axis.place(3.0) == pytest.approx(0.5)
    assert len({text for _, text in axis.ticks()}) > 2


def test_losses_that_differ_by_decades_are_drawn_on_a_logarithmic_axis() -> None:
    assert value_axis([0.01, 9.0], Unit.NUMBER, may_be_log=True).is_log
    assert not value_axis([-1.0, 9.0], Unit.NUMBER, may_be_log=True).is_log
