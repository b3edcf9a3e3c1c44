"""Inner networks of a host are told apart, and a name stands for the interfaces that a user means by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.launcher.rendezvous.host_addresses import (
    Address,
    InterfaceAddresses,
    addresses,
    addresses_of,
    of_interfaces,
    why_unfit,
)
from support.topologies import write_tree


@pytest.mark.parametrize(
    ("address", "interface", "is_fit"),
    [
        ("10.0.0.1", "eth0", True),
        ("10.0.0.1", "br-lan", True),
        ("10.0.0.1", "br0", True),
        ("10.255.0.1", "lo", True),
        ("169.254.1.1", "eth0", True),
        ("fd00::1", "ib0", True),
        ("127.0.0.1", "lo", False),
        ("127.0.1.1", "lo", False),
        ("::1", "lo", False),
        ("fe80::1", "eth0", False),
        ("172.17.0.1", "docker0", False),
        ("172.18.0.1", "br-0123456789ab", False),
        ("192.168.122.1", "virbr0", False),
        ("10.244.0.0", "flannel.1", False),
        ("10.244.0.1", "cni0", False),
        ("10.0.0.9", "vethab12", False),
        ("10.244.0.0", "vxlan.calico", False),
        ("10.244.0.1", "tunl0", False),
        ("169.254.20.10", "nodelocaldns", False),
        ("10.244.0.2", "ovn-k8s-mp0", False),
        ("10.244.0.1", "antrea-gw0", False),
        ("10.244.0.1", "cilium_host", False),
        ("10.0.0.9", "eni0123456789a", False),
        ("10.0.0.9", "enp71s0", True),
        ("100.64.0.7", "tailscale0", True),
    ],
)
def test_loopback_link_local_and_networks_inside_the_host_are_unfit(address: str, interface: str, is_fit: bool) -> None:
    assert (why_unfit(address, interface) is None) == is_fit


def address(text: str, interface: str, unfit: str | None = None) -> Address:
    return Address(address=text, interface=interface, prefix=None, speed_mbit=None, unfit=unfit)


def test_a_name_stands_for_its_interface_or_for_all_that_begin_with_it() -> None:
    eth0, ib0, ib1, docker = (
        address("10.0.0.1", "eth0"),
        address("10.1.0.1", "ib0"),
        address("10.2.0.1", "ib1"),
        address("172.17.0.1", "docker0", "inner"),
    )
    local = address("fe80::1", "ib0", "link-local")
    found = [eth0, docker, ib0, local, ib1]
    assert of_interfaces(found, ["ib", "eth0"]) == [ib0, ib1, eth0]
    assert of_interfaces(found, ["ib1", "ib"]) == [ib1, ib0]
    # Whoever names a bridge of containers means it; that all hosts reach it is still to be proved.
    assert of_interfaces(found, ["docker0"]) == [docker]
    with pytest.raises(DsrunError) as caught:
        of_interfaces(found, ["eth1"])
    assert caught.value.hint == "there is eth0 (10.0.0.1), docker0 (172.17.0.1), ib0 (10.1.0.1), ib1 (10.2.0.1)"


def test_this_machines_loopback_is_listed_with_its_network() -> None:
    (loopback,) = [entry for entry in addresses() if entry.address == "127.0.0.1"]
    assert (loopback.interface, loopback.prefix, loopback.unfit) == ("lo", 8, "loopback")


def test_bridges_without_a_card_are_inside_the_host_whatever_their_name(tmp_path: Path) -> None:
    write_tree(tmp_path / "sys/class/net/lab", {"bridge/bridge_id": "x\n", "type": "1\n"})
    (one,) = addresses_of(tmp_path, [InterfaceAddresses("lab", True, 0, (("192.168.7.1", "255.255.255.0"),))])
    assert one.unfit == "a network of containers or virtual machines inside the host"
