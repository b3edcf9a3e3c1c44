from __future__ import annotations

import signal

import pytest

from dsrun.launcher.session.user_requests import (
    Interrupted,
    Remark,
    SignalRequest,
    StopRequest,
    UserRequest,
    UserRequests,
)


class Reader:
    """Takes all requests, and waits for the job until it has taken one."""

    def __init__(self, requests: UserRequests) -> None:
        self.requests = requests
        self.taken: list[UserRequest] = []
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def handle_requests(self) -> bool:
        while (request := self.requests.take()) is not None:
            self.taken.append(request)
        return not self.taken

    def said(self) -> list[object]:
        """What was taken, stops without their time."""
        return [
            (one.stop.signal, one.reason, one.at_once) if isinstance(one, StopRequest) else one for one in self.taken
        ]


def test_requests_go_to_the_session_that_is_there_in_the_order_they_came() -> None:
    requests = UserRequests()
    assert requests.handle_pending()
    reader = Reader(requests)
    requests.read_by(reader)
    assert requests.handle_pending()
    requests.request_stop(signal.SIGINT, "why")
    requests.kill_now(signal.SIGQUIT)
    requests.pass_signal(signal.SIGUSR1)
    requests.remark("said")
    assert reader.wakes == 4
    assert not requests.handle_pending()
    assert reader.said() == [(2, "why", False), (3, "SIGQUIT", True), SignalRequest(10), Remark("said")]
    assert requests.stop_before_start is None


def test_the_first_stop_waits_for_the_session() -> None:
    requests = UserRequests()
    requests.kill_now(signal.SIGTERM)
    requests.request_stop(signal.SIGINT)
    requests.pass_signal(signal.SIGUSR1)
    requests.remark("nobody hears it")
    assert requests.stop_before_start == signal.SIGTERM
    reader = Reader(requests)
    requests.read_by(reader)
    requests.handle_pending()
    assert reader.said() == [(signal.SIGTERM, "SIGTERM", False)]


def test_a_stop_breaks_off_what_comes_before_the_job_where_it_asks() -> None:
    requests = UserRequests()
    requests.check()
    requests.request_stop(signal.SIGINT)
    requests.request_stop(signal.SIGTERM)
    with pytest.raises(Interrupted):
        requests.check()
    assert requests.stop_before_start == signal.SIGINT


def test_the_session_of_the_next_attempt_takes_what_is_left_and_no_stop_twice() -> None:
    requests, woken = UserRequests(), list[bool]()
    requests.wake_job_by(lambda: woken.append(True))
    requests.request_stop(signal.SIGINT)
    first, second = Reader(requests), Reader(requests)
    requests.read_by(first)
    requests.handle_pending()
    requests.remark("between two attempts")
    requests.read_by(second)
    requests.handle_pending()
    assert (len(first.taken), second.taken) == (1, [Remark("between two attempts")])
    assert woken == [True, True]


@pytest.mark.parametrize(("stops", "given", "remembered"), [(1, 1, None), (2, 1, signal.SIGINT), (0, 0, None)])
def test_a_job_is_stopped_unless_each_stop_was_one_ranks_own(stops: int, given: int, remembered: int | None) -> None:
    requests = UserRequests()
    requests.read_by(Reader(requests))
    for signum in (signal.SIGINT, signal.SIGTERM)[:stops]:
        requests.request_stop(signum)
    requests.interrupts_given = given
    requests.forget_interrupts()
    assert (None if requests.stop is None else requests.stop.signal) == remembered
