from __future__ import annotations

from dsrun.launcher.protocol import Passed
from dsrun.launcher.session.forwarded_signals import ForwardedSignal, SignalRelay


def test_a_signal_is_told_once_all_hosts_have_answered_with_all_their_ranks() -> None:
    relay = SignalRelay()
    relay.send(10, ["a", "b"])
    relay.answered("b", Passed(signal=10, ranks=[3], spared=[2]))
    assert relay.complete() == []
    relay.answered("a", Passed(signal=10, ranks=[1, 0], spared=[]))
    assert relay.complete() == [ForwardedSignal(10, (0, 1, 3), (2,))]
    assert relay.complete() == []


def test_a_host_that_is_gone_is_not_waited_for() -> None:
    relay = SignalRelay()
    relay.send(10, ["a", "b"])
    relay.gone("b")
    relay.answered("a", Passed(signal=10, ranks=[0], spared=[]))
    assert relay.complete() == [ForwardedSignal(10, (0,), ())]


def test_the_same_signal_sent_twice_is_told_twice() -> None:
    relay = SignalRelay()
    for _ in range(2):
        relay.send(10, ["a"])
    for _ in range(2):
        relay.answered("a", Passed(signal=10, ranks=[0], spared=[]))
    assert [passed.ranks for passed in relay.complete()] == [(0,), (0,)]


def test_without_a_host_to_reach_it_is_told_that_nobody_got_it() -> None:
    relay = SignalRelay()
    relay.send(12, [])
    assert relay.complete() == [ForwardedSignal(12, (), ())]
