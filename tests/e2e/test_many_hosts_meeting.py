"""Hosts with several networks, over ssh: they meet at an address that all reach, or are told at once why not."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from dsrun.errors import PreflightError
from dsrun.launcher.rendezvous.address import RendezvousAddress, choose_meeting
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.ssh.openssh import OpensshTransport
from support.channels import RememberingChannels
from support.namespaces import NetHost, Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        for host in made.hosts:
            # What docker leaves on every host, and a bridge of the user's own with one address everywhere.
            add_bridge(host, "docker0", "172.17.0.1/16")
            add_bridge(host, "br0", "172.31.0.1/16")
        # The first host's first network is not known to the second.
        add_bridge(made.hosts[0], "aaa0", "10.77.0.1/24")
        # A name that means the host itself, as distributions write it.
        (made.folder / "n1" / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 n1\n")
        yield made


def add_bridge(host: NetHost, name: str, address: str) -> None:
    host.run("ip", "link", "add", name, "type", "bridge")
    host.run("ip", "link", "add", f"{name}p", "type", "veth", "peer", "name", f"{name}q")
    for end in (f"{name}p", f"{name}q"):
        host.run("ip", "link", "set", end, "master", name, "up")
    host.run("ip", "addr", "add", address, "dev", name)
    host.run("ip", "link", "set", name, "up")


def meet(rig: Rig, iface: str | None = None) -> RendezvousAddress:
    specs = [host.spec() for host in rig.hosts]
    channels = RememberingChannels(OpensshTransport(lease_s=15, config=rig.ssh_config))
    try:
        with Survey(specs, channels, python=sys.executable) as survey:
            return choose_meeting(survey, specs, iface=iface)
    finally:
        channels.end_all()


def test_hosts_meet_on_the_network_they_share(rig: Rig) -> None:
    assert meet(rig) == RendezvousAddress(rig.hosts[0].address, {"n1": "eth0", "n2": "eth0"})


def test_an_interface_that_others_do_not_reach_is_refused_with_the_ones_there_are(rig: Rig) -> None:
    with pytest.raises(PreflightError) as caught:
        meet(rig, "aaa0,br0")
    shown = caught.value.render()
    assert "10.77.0.1 (aaa0): not reached by `n2` (network is unreachable)" in shown
    assert "172.31.0.1 (br0): not reached by `n2` (connection refused)" in shown
    assert "eth0" in str(caught.value.hint)


def test_hosts_meet_over_ipv6_where_nothing_else_is_shared(rig: Rig) -> None:
    first, second = rig.hosts
    if first.address6 is None:
        pytest.skip("the kernel has no IPv6")
    second.run("ip", "route", "add", "blackhole", f"{first.address}/32")
    try:
        assert meet(rig) == RendezvousAddress(first.address6, {"n1": "eth0", "n2": "eth0"})
    finally:
        second.run("ip", "route", "del", "blackhole", f"{first.address}/32")


def test_a_network_that_lets_nothing_through_is_told_in_seconds(rig: Rig) -> None:
    first, second = rig.hosts
    rig.partition(first, second)
    try:
        with pytest.raises(PreflightError) as caught:
            meet(rig)
    finally:
        rig.heal(first, second)
    assert f"{first.address} (eth0): not reached by `n2` (no answer)" in caught.value.render()
    assert "--iface" in str(caught.value.hint)
