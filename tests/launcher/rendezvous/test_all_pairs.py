"""Every two hosts of a job try each other; who is not reached is told with those that miss it."""

from __future__ import annotations

import sys

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.rendezvous.address import HostLinks, RendezvousAddress, find_meeting
from dsrun.launcher.rendezvous.all_pairs import CutOff, cut_off_hosts
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.local import LocalTransport


def hosts(count: int) -> list[HostSpec]:
    return [HostSpec(name=f"n{index + 1}", slots=1, source="test") for index in range(count)]


def test_hosts_that_all_reach_each_other_have_nothing_to_tell() -> None:
    five = hosts(5)
    with Survey(five, LocalTransport(), python=sys.executable) as survey:
        found = find_meeting(survey, five, iface="lo")
        assert sorted(found.ends) == ["n2", "n3", "n4", "n5"]
        assert cut_off_hosts(survey, five, found) == []


def test_two_hosts_have_shown_all_there_is_by_meeting() -> None:
    with Survey([], LocalTransport(), python=sys.executable) as survey:
        assert cut_off_hosts(survey, hosts(2), HostLinks(RendezvousAddress("10.0.0.1", {}), {"n2": "10.0.0.2"})) == []


def test_a_host_that_cannot_listen_at_its_address_is_told_by_name() -> None:
    three = hosts(3)
    # Nobody's address: as that of a host behind a translation of addresses, which is not its own.
    found = HostLinks(RendezvousAddress("127.0.0.1", {}), {"n2": "127.0.0.1", "n3": "192.0.2.1"})
    with Survey(three, LocalTransport(), python=sys.executable) as survey:
        (one,) = cut_off_hosts(survey, three, found)
    assert one == CutOff(host="n3", address="192.0.2.1", by=(), reason="cannot assign requested address")
