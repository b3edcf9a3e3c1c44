from __future__ import annotations

from dsrun.launcher.failures.restarts import AttemptEnd, GiveUp, Restart, Restarts


def failed(uptime_s: float = 1.0, *, step: int | None = None, checkpoint: str | None = None) -> AttemptEnd:
    return AttemptEnd(uptime_s=uptime_s, step=step, checkpoint=checkpoint)


def test_without_restarts_a_job_is_started_once_and_nothing_is_said_about_it() -> None:
    assert Restarts(0, min_uptime_s=60).after(failed()) == GiveUp(None)


def test_a_script_that_fails_3_times_may_be_started_3_times_more_but_not_a_4th() -> None:
    restarts = Restarts(3, min_uptime_s=60)
    assert [restarts.after(failed()) for _ in range(3)] == [Restart(1, 1.0), Restart(2, 2.0), Restart(3, 4.0)]
    assert isinstance(restarts.after(failed()), GiveUp)


def test_a_crash_loop_ends_after_3_restarts_without_progress() -> None:
    restarts = Restarts(10, min_uptime_s=60)
    decisions = [restarts.after(failed()) for _ in range(4)]
    assert [type(decision) for decision in decisions] == [Restart, Restart, Restart, GiveUp]
    assert decisions[-1] == GiveUp("3 restarts in a row made no progress")


def test_a_step_beyond_all_before_is_progress_and_one_that_was_done_before_is_not() -> None:
    restarts = Restarts(100, min_uptime_s=60)
    further = [restarts.after(failed(step=step)) for step in (5, 5, 4, 6, 6, 6)]
    assert all(isinstance(decision, Restart) for decision in further)
    assert isinstance(restarts.after(failed(step=6)), GiveUp)


def test_a_newer_checkpoint_is_progress_and_the_same_one_is_not() -> None:
    restarts = Restarts(100, min_uptime_s=60)
    for checkpoint in ("a", "b", "c", "d", "e", "e", "e"):
        assert isinstance(restarts.after(failed(checkpoint=checkpoint)), Restart)
    assert isinstance(restarts.after(failed(checkpoint="e")), GiveUp)


def test_a_program_that_never_says_how_far_it_is_makes_progress_by_living_long_enough() -> None:
    restarts = Restarts(100, min_uptime_s=60)
    assert all(isinstance(restarts.after(failed(uptime_s=61)), Restart) for _ in range(20))


def test_one_that_says_it_finished_no_step_makes_none_however_long_it_lives() -> None:
    restarts = Restarts(100, min_uptime_s=60)
    decisions = [restarts.after(failed(uptime_s=1000, step=0)) for _ in range(4)]
    assert isinstance(decisions[-1], GiveUp)


def test_waits_double_up_to_a_minute_and_begin_anew_after_an_attempt_that_lived() -> None:
    restarts = Restarts(100, min_uptime_s=60)
    waits: list[float] = []
    for step in range(1, 9):
        decision = restarts.after(failed(step=step))
        assert isinstance(decision, Restart)
        waits.append(decision.wait_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.after(failed(uptime_s=61, step=9)) == Restart(9, 1.0)
