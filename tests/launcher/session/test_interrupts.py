from __future__ import annotations

import signal

import pytest

from dsrun.launcher.failures.report import UserStop
from dsrun.launcher.protocol import Reading, ReadingState
from dsrun.launcher.session.interrupts import Interrupts

CTRL_C = UserStop(signal=signal.SIGINT, time_s=1.0)


def waiting(state: ReadingState = "waits") -> Interrupts:
    interrupts = Interrupts()
    interrupts.reading(Reading(rank=3, state=state))
    return interrupts


def test_an_interrupt_is_the_ranks_that_waits_for_a_person_once_for_each_wait() -> None:
    interrupts = waiting()
    assert interrupts.take(CTRL_C) == 3
    assert interrupts.take(CTRL_C) is None, "it went on waiting as if nothing had come"
    interrupts.reading(Reading(rank=3, state="goes_on"))
    assert interrupts.take(CTRL_C) is None, "it runs"
    interrupts.reading(Reading(rank=3, state="waits"))
    assert interrupts.take(CTRL_C) == 3


@pytest.mark.parametrize("state", ["waits_for_pipe", "typed", "goes_on", "has_none"])
def test_without_a_person_at_a_rank_it_is_the_jobs(state: ReadingState) -> None:
    assert waiting(state).take(CTRL_C) is None
    assert Interrupts().take(CTRL_C) is None


def test_every_other_signal_is_the_jobs() -> None:
    assert waiting().take(UserStop(signal=signal.SIGTERM, time_s=1.0)) is None


def test_a_rank_that_ends_of_it_was_stopped_by_the_user() -> None:
    interrupts = waiting()
    assert interrupts.take(CTRL_C) == 3
    assert interrupts.ended(2, -signal.SIGINT) is None
    assert interrupts.ended(3, 1) is None
    assert interrupts.ended(3, -signal.SIGINT) == CTRL_C
    assert interrupts.take(CTRL_C) is None, "it waits no more"
