from __future__ import annotations

import os
import signal

import pytest

from dsrun.launcher.stopping import StopRequests

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
    stops = StopRequests(passed.append)
    for event in events:
        if isinstance(event, str):
            stops.output_closed()
        else:
            stops.signalled(event)
    assert passed == requests
    # The session names the job's end after the first request it saw.
    assert stops.exit_code(128 + requests[0]) == exit_code


def test_signals_are_caught_inside_the_block_only_and_ignored_ones_stay_ignored() -> None:
    passed: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = [signal.getsignal(signum) for signum in (INT, TERM, HUP)]
    try:
        with StopRequests(passed.append).catching_signals():
            for signum in (TERM, HUP, INT):
                os.kill(os.getpid(), signum)
        assert passed == [TERM, INT]
        assert [signal.getsignal(signum) for signum in (INT, TERM, HUP)] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)
