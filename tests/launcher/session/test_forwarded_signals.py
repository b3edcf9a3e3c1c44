from __future__ import annotations

from dsrun.launcher.protocol import Passed
from dsrun.launcher.session.forwarded_signals import PassedOn, Passing


def test_a_signal_is_told_once_all_hosts_have_answered_with_all_their_ranks() -> None:
    passing = Passing()
    passing.send(10, ["a", "b"])
    passing.answered("b", Passed(signal=10, ranks=[3], spared=[2]))
    assert passing.complete() == []
    passing.answered("a", Passed(signal=10, ranks=[1, 0], spared=[]))
    assert passing.complete() == [PassedOn(10, (0, 1, 3), (2,))]
    assert passing.complete() == []


def test_a_host_that_is_gone_is_not_waited_for() -> None:
    passing = Passing()
    passing.send(10, ["a", "b"])
    passing.gone("b")
    passing.answered("a", Passed(signal=10, ranks=[0], spared=[]))
    assert passing.complete() == [PassedOn(10, (0,), ())]


def test_the_same_signal_sent_twice_is_told_twice() -> None:
    passing = Passing()
    for _ in range(2):
        passing.send(10, ["a"])
    for _ in range(2):
        passing.answered("a", Passed(signal=10, ranks=[0], spared=[]))
    assert [passed.ranks for passed in passing.complete()] == [(0,), (0,)]


def test_without_a_host_to_reach_it_is_told_that_nobody_got_it() -> None:
    passing = Passing()
    passing.send(12, [])
    assert passing.complete() == [PassedOn(12, (), ())]
