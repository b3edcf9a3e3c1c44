"""A figure says what is usual and how far it spreads, with a unit."""

from __future__ import annotations

import json

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.bench.figure import Figure, Unit, figure, figure_text


def test_a_figure_is_the_median_with_its_spread_and_survives_json() -> None:
    one = figure("copy", "B/s", [3e9, 1e9, 2e9])
    assert (one.median, one.low, one.high, one.repetitions) == (2e9, 1e9, 3e9, 3)
    value = json.loads(json.dumps(one.to_json()))
    assert value["source"] == "measured"
    assert Figure.from_json(value) == one


def test_too_few_repetitions_are_no_figure() -> None:
    with pytest.raises(LaunchError, match="copy: 2 repetitions are too few"):
        figure("copy", "B/s", [1.0, 2.0])


@pytest.mark.parametrize(
    ("unit", "values", "text"),
    [
        ("B/s", [12.34e9, 11.9e9, 12.6e9], "12.3 GB/s (11.9 to 12.6)"),
        ("B/s", [999.0, 900.0, 999.4], "999 B/s (900 to 999)"),
        ("FLOP/s", [8e14, 8e14, 8.1e14], "800 TFLOP/s (800 to 810)"),
        ("1/s", [65_000, 64_000, 66_000, 65_000], "65 k/s (64 to 66)"),
        ("s", [21e-6, 20e-6, 25e-6], "21 us (20 to 25)"),
        ("s", [0.2, 0.19, 0.21], "200 ms (190 to 210)"),
    ],
)
def test_figures_are_shown_with_decimal_units(unit: Unit, values: list[float], text: str) -> None:
    assert figure_text(figure("it", unit, values)) == text
