from __future__ import annotations

import os
import signal

import pytest

from dsrun.launcher.console.signals import NO_SUSPENSION, StopRequests

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
CLOSED = "closed"


@pytest.mark.parametrize(
    ("events", "requests", "exit_code"),
    [
        ([INT], [INT], 130),
        ([INT, INT, INT], [INT, INT, INT], 130),
        ([TERM], [TERM], 143),
        ([CLOSED], [TERM], 141),
        ([INT, CLOSED], [INT], 130),
        ([CLOSED, INT], [TERM], 130),
        ([CLOSED, HUP, HUP], [TERM, HUP], 129),
        ([CLOSED, CLOSED], [TERM], 141),
    ],
)
def test_one_wish_is_passed_on_once(events: list[int | str], requests: list[int], exit_code: int) -> None:
    passed: list[int] = []
    stops = StopRequests(lambda signum, reason: passed.append(signum))
    for event in events:
        if isinstance(event, str):
            stops.output_closed()
        else:
            stops.signalled(event)
    assert passed == requests
    # The session names the job's end after the first request it saw.
    assert stops.exit_code(128 + requests[0]) == exit_code


def test_signals_are_caught_inside_the_block_only() -> None:
    passed: list[int] = []
    handlers = [signal.getsignal(signum) for signum in (INT, TERM, HUP)]
    with StopRequests(lambda signum, reason: passed.append(signum)).catching_signals():
        for signum in (TERM, HUP, INT):
            os.kill(os.getpid(), signum)
    assert passed == [TERM, HUP, INT]
    assert [signal.getsignal(signum) for signum in (INT, TERM, HUP)] == handlers


@pytest.mark.parametrize(("ignored", "passed_on"), [(HUP, []), (INT, [INT])])
def test_a_hangup_ignored_by_nohup_stays_so_and_an_interrupt_ignored_by_a_shell_does_not(
    ignored: signal.Signals, passed_on: list[int]
) -> None:
    passed: list[int] = []
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with StopRequests(lambda signum, reason: passed.append(signum)).catching_signals():
            os.kill(os.getpid(), ignored)
        assert passed == passed_on
        assert signal.getsignal(ignored) == signal.SIG_IGN
    finally:
        signal.signal(ignored, before)


class Job:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | str]] = []

    def kill_now(self, signum: int) -> None:
        self.asked.append(("kill", signum))

    def pass_signal(self, signum: int) -> None:
        self.asked.append(("pass", signum))

    def remark(self, text: str) -> None:
        self.asked.append(("remark", text))


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        (signal.SIGQUIT, ("kill", signal.SIGQUIT)),
        (signal.SIGUSR1, ("pass", signal.SIGUSR1)),
        (signal.SIGUSR2, ("pass", signal.SIGUSR2)),
        (signal.SIGTSTP, ("remark", NO_SUSPENSION)),
    ],
)
def test_signals_that_are_no_wish_to_stop_reach_the_job(sent: signal.Signals, asked: tuple[str, int | str]) -> None:
    job, stops = Job(), []
    before = signal.getsignal(sent)
    with StopRequests(lambda signum, reason: stops.append(signum)).catching_signals(job):
        os.kill(os.getpid(), sent)
    assert (job.asked, stops) == ([asked], [])
    assert signal.getsignal(sent) == before


def test_an_interrupt_after_a_quit_is_passed_on_so_that_the_session_may_leave() -> None:
    job = Job()
    passed: list[int] = []
    with StopRequests(lambda signum, reason: passed.append(signum)).catching_signals(job):
        os.kill(os.getpid(), signal.SIGQUIT)
        os.kill(os.getpid(), INT)
    assert (job.asked, passed) == ([("kill", signal.SIGQUIT)], [INT])


def test_a_signal_of_a_known_sender_is_passed_on_by_its_name() -> None:
    passed: list[tuple[int, str | None]] = []
    stops = StopRequests(
        lambda signum, reason: passed.append((signum, reason)), names={signal.SIGTERM: "SIGTERM from Slurm"}
    )
    with stops.catching_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), INT)
    assert passed == [(signal.SIGTERM, "SIGTERM from Slurm"), (INT, None)]
