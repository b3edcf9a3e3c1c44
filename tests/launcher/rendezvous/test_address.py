"""Ranks meet where every host has been, at the fastest such place; without one the error shows who reached what."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dsrun.errors import PreflightError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.rendezvous.address import RendezvousAddress, choose_meeting
from dsrun.launcher.rendezvous.address import decide as decide_with_rails
from dsrun.launcher.rendezvous.host_addresses import Address
from dsrun.launcher.rendezvous.rails import Report
from dsrun.launcher.rendezvous.reachability import Reached
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.local import LocalTransport


def offer(
    address: str, interface: str, *, speed: int | None = None, prefix: int = 24, unfit: str | None = None, **more: Any
) -> Address:
    return Address(address=address, interface=interface, prefix=prefix, speed_mbit=speed, unfit=unfit, **more)


def reached(source: str, interface: str | None = "eth0", *, speed: int | None = None, **more: Any) -> Reached:
    return Reached(source=source, interface=interface, speed_mbit=speed, **more)


def decide(first: str, offers: Sequence[Address], reports: Mapping[str, Report], **more: Any) -> RendezvousAddress:
    return decide_with_rails(first, offers, reports, **more)[0]


SLOW = offer("10.0.0.1", "eth0", speed=1000)
FAST = offer("10.1.0.1", "ib0", speed=200_000)


def both(name: str, number: int) -> Report:
    return {
        SLOW.address: reached(f"10.0.0.{number}", "eth0", speed=1000),
        FAST.address: reached(f"10.1.0.{number}", f"ib{number}", speed=200_000),
    }


def test_the_fastest_address_that_all_reach_is_taken_with_each_hosts_own_interface() -> None:
    met = decide("n1", [SLOW, FAST], {"n2": both("n2", 2), "n3": both("n3", 3)})
    assert met == RendezvousAddress("10.1.0.1", {"n1": "ib0", "n2": "ib2", "n3": "ib3"})


def test_an_address_that_one_host_does_not_reach_is_not_taken() -> None:
    lame: Report = {**both("n3", 3), FAST.address: "no answer"}
    assert decide("n1", [SLOW, FAST], {"n2": both("n2", 2), "n3": lame}).address == "10.0.0.1"


def test_interfaces_the_user_named_go_by_their_order() -> None:
    assert decide("n1", [SLOW, FAST], {"n2": both("n2", 2)}, in_order=True).address == "10.0.0.1"


def test_the_slower_end_of_a_link_counts() -> None:
    fast_here = offer("10.2.0.1", "eth2", speed=400_000)
    report: Report = {**both("n2", 2), fast_here.address: reached("10.2.0.2", speed=100)}
    assert decide("n1", [fast_here, SLOW], {"n2": report}).address == "10.0.0.1"


def test_of_equal_links_the_near_one_then_ipv4_then_the_first_is_taken() -> None:
    far, near, six = offer("10.9.0.1", "eth1"), offer("10.0.0.1", "eth0"), offer("fd00::1", "eth2", prefix=64)
    second = offer("10.0.1.1", "eth3")
    report: Report = {
        far.address: reached("10.0.0.2"),
        six.address: reached("fd00::2"),
        near.address: reached("10.0.0.2"),
        second.address: reached("10.0.1.2"),
    }
    assert decide("n1", [far, six, near, second], {"n2": report}).address == near.address
    assert decide("n1", [far, six, second], {"n2": report}).address == second.address
    assert decide("n1", [far, six], {"n2": report}).address == six.address
    assert decide("n1", [far], {"n2": report}).address == far.address


def test_a_card_of_unknown_speed_wins_over_a_slow_one_and_yields_to_a_fast_one() -> None:
    cloud = offer("10.3.0.1", "ens5", kind="card", cards=("0000:00:05.0",))
    end = reached("10.3.0.2", "ens5", kind="card", cards=("0000:00:05.0",))
    report: Report = {**both("n2", 2), cloud.address: end}
    assert decide("n1", [SLOW, cloud], {"n2": report}).address == cloud.address
    assert decide("n1", [cloud, FAST], {"n2": report}).address == FAST.address


def test_of_equal_rails_the_one_with_the_default_route_is_taken() -> None:
    offers = [offer(f"10.{rail}.0.1", f"eth{rail}", speed=400_000, default_route=rail == 3) for rail in range(5)]
    report: Report = {f"10.{rail}.0.1": reached(f"10.{rail}.0.2", f"eth{rail}", speed=400_000) for rail in range(5)}
    met = decide("n1", offers, {"n2": report})
    assert met.address == "10.3.0.1"
    assert met.reason == "as fast as eth0, eth1, eth2, eth4 (400 Gbit/s), and has the default route"


def test_a_tunnel_is_taken_only_where_nothing_else_leads_to_all() -> None:
    tunnel = offer("100.64.0.1", "tailscale0", speed=100_000, kind="tunnel")
    report: Report = {SLOW.address: reached("10.0.0.2"), tunnel.address: reached("100.64.0.2", "wg0", kind="tunnel")}
    met = decide("n1", [tunnel, SLOW], {"n2": report})
    assert (met.address, met.reason) == (SLOW.address, "tailscale0 is a tunnel")
    assert decide("n1", [tunnel], {"n2": report}).address == tunnel.address


def test_what_was_chosen_and_why_is_one_line_and_nothing_without_a_choice() -> None:
    met = decide("n1", [SLOW, FAST], {"n2": both("n2", 2)})
    assert met.text() == ("ranks meet at 10.1.0.1 (ib0): the fastest that all reach (200 Gbit/s; eth0 1 Gbit/s)")
    assert decide("n1", [SLOW], {"n2": both("n2", 2)}).text() is None


def test_an_address_the_host_gave_itself_is_the_last_resort() -> None:
    own = offer("169.254.3.1", "eth1", prefix=16, speed=10_000)
    report: Report = {own.address: reached("169.254.3.2", speed=10_000), SLOW.address: reached("10.0.0.2", speed=1000)}
    assert decide("n1", [own, SLOW], {"n2": report}).address == SLOW.address
    assert decide("n1", [own], {"n2": report}).address == own.address


def test_a_host_whose_end_is_no_interfaces_gets_no_interface() -> None:
    assert decide("n1", [SLOW], {"n2": {SLOW.address: reached("10.0.0.2", None)}}).interfaces == {"n1": "eth0"}


def test_without_a_common_address_the_error_shows_who_missed_which_and_the_way_out() -> None:
    reports: dict[str, Report] = {
        "n2": {SLOW.address: reached("10.0.0.2"), FAST.address: "network is unreachable"},
        "n3": {SLOW.address: "no answer", FAST.address: reached("10.1.0.3")},
        "n4": {SLOW.address: "connection refused", FAST.address: "network is unreachable"},
    }
    docker = offer("172.17.0.1", "docker0", unfit="a network of containers or virtual machines inside the host")
    loopback = offer("127.0.0.1", "lo", unfit="loopback")
    with pytest.raises(PreflightError) as caught:
        decide("n1", [SLOW, FAST], reports, left_out=[docker, loopback])
    assert caught.value.exit_code == 75
    assert caught.value.render().splitlines() == [
        "error: host n1: none of its addresses is reached by all other hosts",
        "  10.0.0.1 (eth0): not reached by `n3` (no answer), `n4` (connection refused)",
        "  10.1.0.1 (ib0): not reached by `n2`, `n4` (network is unreachable)",
        "  not tried: docker0",
        "hint: let its firewall pass TCP from the others, or name the interface of a network that all are on with "
        "`--iface` (n1 has eth0, ib0, docker0)",
    ]


def test_a_host_with_loopback_and_bridges_alone_is_told_so() -> None:
    # A host's name that resolves to 127.0.1.1 changes nothing: names are not asked.
    left_out = [offer("127.0.0.1", "lo", unfit="loopback"), offer("127.0.1.1", "lo", unfit="loopback")]
    with pytest.raises(PreflightError) as caught:
        decide("n1", [], {"n2": {}}, left_out=left_out)
    assert str(caught.value).splitlines() == [
        "host n1 has no address that other hosts could reach",
        "  127.0.0.1 (lo): loopback",
        "  127.0.1.1 (lo): loopback",
    ]


def hosts(count: int) -> list[HostSpec]:
    return [HostSpec(name=f"n{index + 1}", slots=1, source="test") for index in range(count)]


def test_a_job_of_one_host_meets_on_its_loopback_and_asks_nobody() -> None:
    one = hosts(1)
    with Survey([], LocalTransport(), python=sys.executable) as survey:
        assert choose_meeting(survey, one) == RendezvousAddress("127.0.0.1", {})


def test_hosts_meet_at_the_interface_that_was_named() -> None:
    three = hosts(3)
    with Survey(three, LocalTransport(), python=sys.executable) as survey:
        met = choose_meeting(survey, three, iface="lo")
        assert met == RendezvousAddress("127.0.0.1", {"n1": "lo", "n2": "lo", "n3": "lo"})
        with pytest.raises(PreflightError) as caught:
            choose_meeting(survey, three, iface="lo,none-such")
    assert str(caught.value) == "host n1: `--iface none-such`: no interface of that name has an address"
    assert "lo (127.0.0.1)" in str(caught.value.hint)
