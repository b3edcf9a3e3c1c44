"""NCCL's sockets spread over cards that are alike, where each leads to every other host by itself, and nowhere else."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.machine.network.interfaces import RdmaDevice, RdmaPort
from dsrun.launcher.rendezvous.address import RendezvousAddress, choose_meeting
from dsrun.launcher.rendezvous.host_addresses import Address
from dsrun.launcher.rendezvous.rails import Rail, proven_rails
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.local import LocalTransport
from support.made_up_network import MadeUpHost, MadeUpNetwork

PORT = RdmaPort(
    number=1,
    layer="InfiniBand",
    state="ACTIVE",
    physical="LinkUp",
    rate_gbit=400,
    link_downed=0,
    symbol_errors=0,
    gid_index=0,
    gid="fe80::1",
)
CARD = RdmaDevice(
    name="mlx5_0", kind="InfiniBand", firmware=None, interface=None, pci_address=None, numa_node=None, ports=(PORT,)
)


def address(text: str, interface: str, *, prefix: int = 24, **more: Any) -> Address:
    known: dict[str, Any] = {"speed_mbit": 100_000, "kind": "card", "driver": "mlx5_core", "cards": (interface,)}
    return Address(address=text, interface=interface, prefix=prefix, unfit=None, **{**known, **more})


def of_rails(number: int, count: int = 4, **more: Any) -> list[Address]:
    """Data networks of a host, one network each, behind a slower one of its own."""
    management = address(f"10.0.0.{number}", "eth0", speed_mbit=10_000, default_route=True, driver="ixgbe")
    return [management, *(address(f"10.{rail}.0.{number}", f"eth{rail}", **more) for rail in range(1, count + 1))]


def met(network: MadeUpNetwork, *, iface: str | None = None, env: dict[str, str] | None = None) -> RendezvousAddress:
    survey: Any = network
    return choose_meeting(survey, network.specs, iface=iface, env=env)


def hosts(count: int, **more: Any) -> dict[str, MadeUpHost]:
    return {f"n{number}": MadeUpHost(of_rails(number, **more)) for number in range(1, count + 1)}


def test_cards_of_equal_speed_on_networks_of_their_own_are_all_used_and_a_slower_one_is_not() -> None:
    found = met(MadeUpNetwork(hosts(3)))
    assert found.rails == dict.fromkeys(("n1", "n2", "n3"), ("eth1", "eth2", "eth3", "eth4"))
    assert found.interfaces == dict.fromkeys(("n1", "n2", "n3"), "eth1")
    assert found.variables()["n2"] == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1,eth2,eth3,eth4"}
    assert found.text() == (
        "ranks meet at 10.1.0.1 (eth1): as fast as eth2, eth3, eth4 (100 Gbit/s), and comes first; "
        "NCCL's sockets use eth1, eth2, eth3, eth4"
    )


def test_cards_of_a_cloud_that_tell_no_speed_are_alike() -> None:
    machines = {
        f"n{number}": MadeUpHost(
            [address(f"10.{rail}.0.{number}", f"eth{rail}", speed_mbit=None, driver="gve") for rail in range(5)]
        )
        for number in (1, 2)
    }
    assert met(MadeUpNetwork(machines)).rails["n2"] == ("eth0", "eth1", "eth2", "eth3", "eth4")


def test_other_cards_that_tell_no_speed_may_be_anything() -> None:
    machines = {
        f"n{number}": MadeUpHost(
            [address(f"10.{rail}.0.{number}", f"eth{rail}", speed_mbit=None, driver="virtio_net") for rail in range(2)]
        )
        for number in (1, 2)
    }
    network = MadeUpNetwork(machines)
    assert met(network).rails == {}
    assert "listen_rails" not in network.asked


def test_two_cards_in_one_network_are_one_rail() -> None:
    # All packets leave by the first, whichever address they are for.
    machines = {
        f"n{number}": MadeUpHost(
            [
                address(f"10.1.{card}.{number}", f"eth{card}", prefix=16, driver="ena", speed_mbit=None)
                for card in (0, 1)
            ]
        )
        for number in (1, 2)
    }
    assert met(MadeUpNetwork(machines)).rails == {}


def test_vlans_of_one_card_are_one_rail() -> None:
    machines = {
        f"n{number}": MadeUpHost(
            [
                address(f"10.{vlan}.0.{number}", f"eth0.{vlan}", kind="vlan", cards=("0000:41:00.0",))
                for vlan in (100, 200)
            ]
        )
        for number in (1, 2)
    }
    assert met(MadeUpNetwork(machines)).rails == {}


def test_a_rail_that_two_other_hosts_do_not_share_is_left_out() -> None:
    machines = hosts(3)
    # Both reach the first host there, but not each other.
    machines["n3"].drops = ("10.2.0.0/24",)
    assert met(MadeUpNetwork(machines)).rails["n1"] == ("eth1", "eth3", "eth4")


@pytest.mark.parametrize("env", [{"NCCL_NET": "GPUDirectTCPX"}, {"NCCL_NET": "IB"}, {"NCCL_NET_PLUGIN": "fastrak"}])
def test_where_a_plugin_is_named_one_interface_is_enough(env: dict[str, str]) -> None:
    assert met(MadeUpNetwork(hosts(2)), env=env).rails == {}
    machines = hosts(2)
    machines["n2"].environ = env
    assert met(MadeUpNetwork(machines)).rails == {}


def test_with_rdma_one_interface_is_enough_unless_it_is_switched_off() -> None:
    machines = hosts(2)
    machines["n2"].cards = (CARD,)
    assert met(MadeUpNetwork(machines)).rails == {}
    assert met(MadeUpNetwork(machines), env={"NCCL_IB_DISABLE": "1"}).rails["n2"] == ("eth1", "eth2", "eth3", "eth4")
    assert met(MadeUpNetwork(machines), env={"NCCL_NET": "Socket"}).rails["n2"] == ("eth1", "eth2", "eth3", "eth4")


def test_interfaces_that_were_named_are_the_only_ones() -> None:
    assert met(MadeUpNetwork(hosts(2)), iface="eth2,eth3").rails["n1"] == ("eth2", "eth3")
    assert met(MadeUpNetwork(hosts(2)), iface="eth2").rails == {}


def test_real_hosts_answer_what_is_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    names = ("n1", "n2")
    rails = [Rail(dict.fromkeys(names, "lo"), dict.fromkeys(names, f"127.0.0.{number}")) for number in (1, 2)]
    elsewhere = Rail(dict.fromkeys(names, "eth7"), dict.fromkeys(names, "127.0.0.3"))
    two = [HostSpec(name=name, slots=1, source="test") for name in names]
    with Survey(two, LocalTransport(), python=sys.executable) as survey:
        # What leaves by another interface than its own is no rail.
        assert proven_rails(survey, two, [*rails, elsewhere], {"NCCL_NET": "Socket"}) == rails
        assert proven_rails(survey, two, rails, {"NCCL_NET": "IB"}) == []


def test_no_host_opens_more_files_than_a_login_may_have() -> None:
    """16 networks of 70 hosts would be 1024 connections a host."""
    network = MadeUpNetwork({f"n{number}": MadeUpHost(of_rails(number, 16)) for number in range(1, 71)})
    asked: list[int] = []
    reach = network.reach

    def counted(host: MadeUpHost, arguments: Any) -> Any:
        asked.append(len(arguments["targets"]))
        return reach(host, arguments)

    network.reach = counted
    assert len(met(network).rails["n70"]) == 16
    assert max(asked) == 512
