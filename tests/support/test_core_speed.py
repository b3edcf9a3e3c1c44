"""Seconds of a fixed core: the least of the measurements, and never more than was measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.core_speed import core_seconds, least_seconds, program_core_seconds


def test_the_least_measurement_counts_and_never_for_more_than_it_took() -> None:
    measured = iter([3.0, 1.0, 2.0])
    assert 0 < least_seconds(lambda: next(measured)) <= 1.0


@pytest.mark.depends_on_speed("it compares two measurements")
def test_work_of_twice_the_length_counts_about_twice() -> None:
    once = core_seconds(lambda: sum(range(2_000_000)), tries=5)
    twice = core_seconds(lambda: sum(range(4_000_000)), tries=5)
    assert 1.2 * once < twice < 3.3 * once


def test_a_program_s_own_seconds_count_and_one_that_fails_is_no_measurement() -> None:
    waits = program_core_seconds([sys.executable, "-Sc", "import time; time.sleep(0.5)"], tries=1)
    assert 0 < waits < 0.5
    with pytest.raises(subprocess.CalledProcessError):
        program_core_seconds([sys.executable, "-c", "raise SystemExit(3)"], tries=1)
