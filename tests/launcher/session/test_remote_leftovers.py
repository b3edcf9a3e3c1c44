"""Sweeps of several hosts: what they find comes back by host, and a host that is out of touch holds up no end."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

import pytest

from dsrun.launcher.agent.leftovers import sweep_command
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.session.remote_leftovers import Swept, sweep_hosts
from dsrun.launcher.transport.fake import FakeChannel, FakeTransport

ENDED = b'{"agents": [], "ended": [{"pid": 7, "name": "python3"}], "left": []}'
STUBBORN = b'{"agents": [], "ended": [], "left": [8, 9]}'


def box(name: str) -> HostSpec:
    return HostSpec(name=name, slots=1, source="test")


def command(host: HostSpec) -> list[str]:
    return sweep_command(host.python or "python", "job", "nonce")


class SlowTransport(FakeTransport):
    """Reaches one of its hosts only once `let_in` is set."""

    def __init__(self, slow: str, swept: dict[str, bytes]) -> None:
        super().__init__({name: [] for name in (*swept, slow)}, swept=swept)
        self.let_in = threading.Event()
        self._slow = slow

    def start(self, host: HostSpec, argv: Sequence[str]) -> FakeChannel:
        if host.name == self._slow:
            self.let_in.wait()
        return super().start(host, argv)


@pytest.fixture
def transport() -> Generator[SlowTransport]:
    made = SlowTransport("slow", {"slow": ENDED, "far": STUBBORN, "box": ENDED})
    yield made
    made.let_in.set()


def test_what_was_found_is_told_by_host() -> None:
    transport = FakeTransport({"b": [], "a": []}, swept={"b": ENDED, "a": STUBBORN})
    found = sweep_hosts([box("b"), box("a")], command, transport)
    assert found == [Swept("a", (), (8, 9)), Swept("b", ("python3 (7)",), ())]


def test_a_host_that_cannot_be_reached_is_left_out() -> None:
    transport = FakeTransport({"b": []}, swept={"b": ENDED})
    assert sweep_hosts([box("gone"), box("b")], command, transport) == [Swept("b", ("python3 (7)",), ())]


def test_a_host_out_of_touch_that_does_not_answer_is_not_waited_for(transport: SlowTransport) -> None:
    hosts = [box("slow"), box("far"), box("box")]
    # `far` is out of touch too, and answers.
    found = sweep_hosts(hosts, command, transport, out_of_touch=["slow", "far"], reach_patience_s=0.2)
    assert not transport.let_in.is_set()
    assert [swept.host for swept in found] == ["box", "far"]


def test_a_host_that_is_in_touch_may_take_its_time(transport: SlowTransport) -> None:
    later = threading.Timer(0.3, transport.let_in.set)
    later.start()
    found = sweep_hosts([box("slow")], command, transport, reach_patience_s=0.01)
    assert found == [Swept("slow", ("python3 (7)",), ())]
    later.join()
