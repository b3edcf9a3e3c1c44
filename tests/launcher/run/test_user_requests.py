from __future__ import annotations

import signal

import pytest

from dsrun.launcher.run.user_requests import Interrupted, Wishes


class Job:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def request_stop(self, signum: int, why: str | None = None) -> None:
        self.asked.append(("stop", signum, why))

    def kill_now(self, signum: int) -> None:
        self.asked.append(("kill", signum))

    def pass_signal(self, signum: int) -> None:
        self.asked.append(("pass", signum))

    def remark(self, text: str) -> None:
        self.asked.append(text)

    def obey_requests(self) -> bool:
        return not self.asked


def test_wishes_go_to_the_job_that_is_there() -> None:
    wishes, job = Wishes(), Job()
    assert wishes.obey()
    wishes.pass_to(job)
    assert wishes.obey()
    wishes.request_stop(signal.SIGINT, "why")
    wishes.kill_now(signal.SIGQUIT)
    wishes.pass_signal(signal.SIGUSR1)
    wishes.remark("said")
    assert job.asked == [("stop", 2, "why"), ("kill", 3), ("pass", 10), "said"]
    assert not wishes.obey()
    assert wishes.early_stop is None


def test_the_first_stop_waits_for_the_job() -> None:
    wishes, job = Wishes(), Job()
    wishes.kill_now(signal.SIGTERM)
    wishes.request_stop(signal.SIGINT)
    wishes.pass_signal(signal.SIGUSR1)
    assert wishes.early_stop == signal.SIGTERM
    wishes.pass_to(job)
    assert job.asked == [("stop", signal.SIGTERM, None)]


def test_a_stop_breaks_off_what_comes_before_the_job_where_it_asks() -> None:
    wishes = Wishes()
    wishes.check()
    wishes.request_stop(signal.SIGINT)
    wishes.request_stop(signal.SIGTERM)
    with pytest.raises(Interrupted):
        wishes.check()
    assert wishes.early_stop == signal.SIGINT
