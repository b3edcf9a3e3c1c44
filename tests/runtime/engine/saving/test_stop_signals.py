"""A signal is noted once, told to all ranks as a number, and a second wish ends at once."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from dsrun.errors import InputError
from dsrun.runtime.engine.saving.stop_signals import NAMES, ONE_WISH_S, StopSignals, from_sum, to_number
from support.ranks import run_ranks

TERM, USR1, USR2 = (signal.Signals[name] for name in NAMES)


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _note(names: list[str], sent: list[str], wanted: bool = True) -> tuple[str | None, list[str]]:
    """What is noted of signals that come 1 s apart, and what came through to those who caught them before."""
    heard: list[str] = []
    for number in (TERM, USR1, USR2):
        signal.signal(number, lambda found, _: heard.append(signal.Signals(found).name))
    clock = Clock()
    signals = StopSignals(names, is_wanted=lambda: wanted, clock=clock)
    for name in sent:
        os.kill(os.getpid(), signal.Signals[name])
        clock.now_s += 1.0
    noted = None if signals.noted is None else signals.noted.name
    signals.remove()
    os.kill(os.getpid(), TERM)
    assert heard.pop() == "SIGTERM", "given back"
    return noted, heard


def noted_of(*arguments: Any) -> tuple[str | None, list[str]]:
    # In a process of its own: these signals are not the test runner's to play with.
    return run_ranks(1, _note, *arguments)[0]


def test_the_first_signal_counts_and_what_comes_with_it_is_the_same_wish() -> None:
    assert noted_of(["SIGTERM", "SIGUSR1"], ["SIGUSR1", "SIGTERM", "SIGUSR1"]) == ("SIGUSR1", [])
    assert noted_of(["SIGTERM"], ["SIGUSR1"]) == (None, ["SIGUSR1"]), "only what was asked for is caught"
    assert noted_of(["SIGTERM"], []) == (None, [])


def test_a_later_one_ends_at_once_as_it_would_have_before() -> None:
    assert ONE_WISH_S == 3
    assert noted_of(["SIGTERM"], ["SIGTERM"] * 4) == ("SIGTERM", ["SIGTERM"])


def test_nothing_is_noted_for_nobody() -> None:
    assert noted_of(["SIGTERM"], ["SIGTERM"], False) == (None, ["SIGTERM"])


def _fork_of_a_rank(name: str) -> int:
    signals = StopSignals(["SIGTERM", "SIGUSR1"], is_wanted=lambda: True)
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.Signals[name])
        os._exit(5)
    status = os.waitpid(child, 0)[1]
    signals.remove()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(("name", "ended"), [("SIGTERM", -signal.SIGTERM), ("SIGUSR1", 5)])
def test_a_fork_of_a_rank_ends_of_a_stop_and_does_not_care_for_other_wishes(name: str, ended: int) -> None:
    assert run_ranks(1, _fork_of_a_rank, name) == [ended]


def test_what_cannot_be_noted_is_refused() -> None:
    with pytest.raises(InputError, match=r"signals are \['SIGKILL'\]"):
        StopSignals(["SIGKILL"], is_wanted=lambda: True)
    with pytest.raises(InputError, match=r"signals are \[\]"):
        StopSignals([], is_wanted=lambda: True)
    found: list[InputError] = []

    def elsewhere() -> None:
        with pytest.raises(InputError, match="main thread alone") as caught:
            StopSignals(["SIGTERM"], is_wanted=lambda: True)
        found.append(caught.value)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("told", "agreed"),
    [
        ([None] * 4, None),
        ([None, USR1, None, None], USR1),
        ([USR2, TERM, USR1], TERM),
        ([TERM] * 5000, TERM),
        ([USR2] * 5000 + [USR1], USR1),
        ([USR2] * 100_000, USR2),
    ],
)
def test_ranks_agree_on_what_any_of_them_got(told: list[signal.Signals | None], agreed: signal.Signals | None) -> None:
    assert from_sum(sum(to_number(one) for one in told)) == agreed
