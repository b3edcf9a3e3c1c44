"""The table of what calls kept, dropped and took."""

from __future__ import annotations

from dsrun.runtime.activation.choose.profile import Profile


def test_the_table_has_last_bytes_and_median_seconds_of_each_name() -> None:
    profile = Profile()
    for seconds, kept in ((0.5, 1), (0.001, 2048), (0.0025, 4096)):
        profile.ran("blocks.0", seconds=seconds, kept_bytes=kept, dropped_bytes=65536)
    profile.ran_again("blocks.0", seconds=0.003)
    profile.ran_again("blocks.0", seconds=0.004)
    profile.ran("blocks.10", seconds=0.01, kept_bytes=512, dropped_bytes=0)
    assert str(profile).splitlines() == [
        "block         kept   dropped   forward    again",
        "blocks.0   4.0 KiB  64.0 KiB   2.50 ms  3.50 ms",
        "blocks.10    512 B       0 B  10.00 ms        -",
    ]


def test_nothing_that_ran_is_a_line_of_heads() -> None:
    assert str(Profile()) == "block  kept  dropped  forward  again"


def test_a_call_that_only_ran_again_is_in_the_table() -> None:
    profile = Profile()
    profile.ran_again("late", seconds=1.0)
    assert profile.figures["late"].again_s == [1.0]
    assert str(profile).splitlines()[1].split() == ["late", "0", "B", "0", "B", "-", "1000.00", "ms"]
