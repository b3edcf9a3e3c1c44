"""Silence counts only while somebody could have heard."""

from __future__ import annotations

from dsrun.launcher.lifeline import Lifeline


def test_silence_for_the_lease_is_the_end() -> None:
    lifeline = Lifeline(2.0, 100.0)
    assert [lifeline.has_run_out(now_s) for now_s in (101.0, 102.0, 103.0)] == [False, False, True]


def test_a_word_renews_the_lease() -> None:
    lifeline = Lifeline(2.0, 100.0)
    lifeline.has_run_out(102.0)
    lifeline.renew()
    assert [lifeline.has_run_out(now_s) for now_s in (103.0, 104.0, 105.0)] == [False, False, True]


def test_a_process_that_was_stopped_for_an_hour_gives_the_other_end_time_to_be_heard() -> None:
    lifeline = Lifeline(15.0, 100.0)
    assert not lifeline.has_run_out(3700.0)
    assert not lifeline.has_run_out(3701.0)
    lifeline.renew()
    assert not lifeline.has_run_out(3703.0)
