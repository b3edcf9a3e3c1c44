from __future__ import annotations

import pytest

from dsrun.launcher.dashboard.braille import curve_rows, value_range


def test_a_line_goes_from_corner_to_corner() -> None:
    assert curve_rows([(0, 0), (1, 1)], columns=2, rows=1) == ["⡠⠊"]
    assert curve_rows([(0, 1), (1, 0)], columns=2, rows=1) == ["⠑⢄"]


def test_a_jump_leaves_no_gap() -> None:
    assert curve_rows([(0, 0), (1, 0), (2, 8), (3, 8)], columns=2, rows=2) == [" ⡏", "⣸ "]


@pytest.mark.parametrize("points", [[(5, 3.0)], [(0, 3.0), (9, 3.0)]])
def test_values_that_are_all_the_same_are_drawn_in_the_middle(points: list[tuple[float, float]]) -> None:
    rows = curve_rows(points, columns=3, rows=3)
    assert rows[0].strip() == rows[2].strip() == ""
    assert rows[1].strip()


def test_without_points_rows_are_blank_and_as_wide() -> None:
    assert curve_rows([], columns=3, rows=2) == ["   ", "   "]


def test_one_spike_does_not_flatten_the_curve() -> None:
    values = [float(number % 10) for number in range(200)]
    assert value_range([*values, 1e9]) == (0, 9)
    assert value_range([1.0, 1e9]) == (1, 1e9), "of few points each may be what it is about"
    rows = curve_rows(list(enumerate([*values, 1e9])), columns=10, rows=2)
    assert [len(row) for row in rows] == [10, 10]


def test_many_points_in_few_columns_show_the_least_and_the_greatest() -> None:
    rows = curve_rows([(number, float(number % 2)) for number in range(1000)], columns=4, rows=1)
    assert rows == ["⣿⣿⣿⣿"]


def test_a_rate_that_hardly_changes_is_flat_where_its_curve_begins_at_nothing() -> None:
    rates = [(step, 100.0 + step % 3) for step in range(100)]
    assert curve_rows(rates, columns=4, rows=1, low=0.0) == ["⠉⠉⠉⠉"]
    assert curve_rows(rates, columns=4, rows=1) != ["⠉⠉⠉⠉"]
