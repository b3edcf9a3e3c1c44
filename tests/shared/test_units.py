from __future__ import annotations

import pytest

from dsrun.units import format_bytes, format_count, format_duration, format_list, format_names


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (28.0 * 2**20, "28.0 MiB"), (3 * 2**50, "3.0 PiB")],
)
def test_bytes_have_binary_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (90_300, "90.3K"), (2_340_000, "2.34M"), (7e9, "7B"), (999_900, "1M"), (1.5e12, "1.5T")],
)
def test_counts_have_three_digits_and_decimal_units(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (1.0, "1.0s"), (59.94, "59.9s"), (60, "1m 0s"), (3725, "1h 2m 5s")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_list_says_how_many_it_leaves_out() -> None:
    assert [format_list(["a", "b", "c", "d"][:count], 2) for count in range(5)] == [
        "",
        "a",
        "a, b",
        "a, b and 1 more",
        "a, b and 2 more",
    ]


def test_names_in_a_list_stand_between_back_ticks() -> None:
    assert format_names(["a", "b", "c"], 2) == "`a`, `b` and 1 more"
    assert format_names(["a"], 1) == "`a`"
