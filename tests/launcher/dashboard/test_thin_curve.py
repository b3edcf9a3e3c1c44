from __future__ import annotations

from dsrun.launcher.dashboard.thin_curve import ThinCurve


def test_a_short_run_has_a_point_a_step() -> None:
    curve = ThinCurve(8)
    for step in (1, 2, 5):
        curve.add(step, 10.0 * step)
    assert curve.points() == [(1, 10), (2, 20), (5, 50)]


def test_a_run_of_any_length_keeps_its_memory_its_mean_and_its_shape() -> None:
    curve = ThinCurve(64)
    for step in range(100_000):
        curve.add(step, float(step))
    points = curve.points()
    assert 32 <= len(points) <= 64
    assert [value for _, value in points[:-1]] == [step for step, _ in points[:-1]], "means of whole stretches"
    assert points[-1][1] <= 99_999


def test_steps_that_are_taken_again_are_forgotten() -> None:
    curve = ThinCurve(8)
    for step in range(1, 7):
        curve.add(step, 1.0)
    curve.cut(4)
    curve.add(4, 9.0)
    assert curve.points() == [(1, 1), (2, 1), (3, 1), (4, 9)]


def test_of_a_stretch_in_which_steps_are_taken_again_nothing_of_before_is_left() -> None:
    curve = ThinCurve(4)
    for step in range(16):
        curve.add(step, 1.0)
    curve.cut(9)
    for step in range(9, 16):
        curve.add(step, 5.0)
    assert curve.points()[-1][1] == 5.0
    assert {value for _, value in curve.points()} == {1.0, 5.0}
    curve.cut(0)
    assert curve.points() == []
