"""Knocking again: at what may pass, as long as there is time, and at nothing else."""

from __future__ import annotations

import threading

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.ssh.faults import NotYet, refused
from dsrun.launcher.transport.ssh.retries import knock

BOX = HostSpec(name="box", slots=1, source="test")


class Door:
    """Opens at the given knock."""

    def __init__(self, opens_at: int, fault: LaunchError) -> None:
        self.timeouts: list[float] = []
        self._opens_at = opens_at
        self._fault = fault

    def knock(self, timeout_s: float) -> str:
        self.timeouts.append(timeout_s)
        if len(self.timeouts) < self._opens_at:
            raise self._fault
        return "open"


def test_what_may_pass_is_tried_again_with_the_time_that_is_left() -> None:
    door = Door(3, refused(BOX))
    said: list[str] = []
    assert knock(door.knock, patience_s=60, stopped=threading.Event(), note=said.append) == "open"
    assert door.timeouts[0] == 60
    assert door.timeouts == sorted(door.timeouts, reverse=True)
    assert len(door.timeouts) == 3
    # It passed within a second, unless this machine is very busy.
    assert len(said) <= 1


def test_what_repeats_itself_is_told_at_once() -> None:
    door = Door(2, LaunchError("host box: wrong key"))
    with pytest.raises(LaunchError, match="wrong key"):
        knock(door.knock, patience_s=60, stopped=threading.Event(), note=None)
    assert len(door.timeouts) == 1


def test_it_ends_with_the_time_that_there_is() -> None:
    door = Door(1000, refused(BOX))
    with pytest.raises(NotYet):
        knock(door.knock, patience_s=1.5, stopped=threading.Event(), note=None)
    assert 1 <= len(door.timeouts) < 20
    assert min(door.timeouts) >= 1


def test_it_can_be_stopped() -> None:
    stopped = threading.Event()
    knocked = threading.Event()

    def connect(timeout_s: float) -> None:
        knocked.set()
        raise refused(BOX)

    faults: list[LaunchError] = []

    def work() -> None:
        try:
            knock(connect, patience_s=3600, stopped=stopped, note=None)
        except NotYet as fault:
            faults.append(fault)

    waiting = threading.Thread(target=work)
    waiting.start()
    assert knocked.wait(20)
    stopped.set()
    waiting.join(20)
    assert len(faults) == 1


def test_what_lasts_is_told_once() -> None:
    said: list[str] = []

    def connect(timeout_s: float) -> str:
        if not said:
            raise refused(BOX)
        return "open"

    assert knock(connect, patience_s=60, stopped=threading.Event(), note=said.append) == "open"
    assert len(said) == 1
    assert "connection refused" in said[0]
