from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.network.interfaces import (
    NetworkReport,
    default_routes,
    gloo_interface,
    nccl_interface,
    psutil_addresses,
    read_network,
    read_rdma,
)
from support.machines import recorded_machine
from support.topologies import write_tree

HEAD = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
NO_ROUTE = "0" * 32


def link(name: str, *addresses: str, state: str = "up") -> NetworkReport:
    return NetworkReport(
        interface=name,
        kind="ethernet",
        state=state,
        mtu=1500,
        speed_mbit=None,
        driver=None,
        addresses=addresses,
        default_route=False,
        numa_node=None,
    )


def test_cards_are_told_with_and_without_addresses_and_virtual_ones_only_with(tmp_path: Path) -> None:
    net = "sys/class/net"
    write_tree(
        tmp_path,
        {
            f"{net}/lo/operstate": "unknown\n",
            f"{net}/docker0/operstate": "down\n",
            f"{net}/veth1a/operstate": "up\n",
            f"{net}/bond0/operstate": "up\n",
            f"{net}/bond0/mtu": "9000\n",
            f"{net}/bonding_masters": "bond0\n",
            f"{net}/eno1/operstate": "down\n",
            f"{net}/eno1/speed": "-1\n",
            f"{net}/eno1/device/vendor": "0x8086\n",
        },
    )
    addresses = {
        "lo": ["127.0.0.1", "::1"],
        "bond0": ["10.0.0.5", "fe80::1%bond0", "fd00::5"],
        "docker0": ["172.17.0.1"],
    }
    found = {report.interface: report for report in read_network(tmp_path, addresses)}
    assert list(found) == ["bond0", "docker0", "eno1"]
    assert (found["bond0"].kind, found["bond0"].mtu, found["bond0"].addresses) == (
        *("virtual", 9000),
        ("10.0.0.5", "fd00::5"),
    )
    assert (found["eno1"].kind, found["eno1"].state, found["eno1"].speed_mbit) == ("ethernet", "down", None)


def test_a_recorded_card_has_speed_driver_node_and_the_default_route(tmp_path: Path) -> None:
    network = recorded_machine("dgx_h100", tmp_path).report().network
    (storage,) = [report for report in network if report.interface == "ens6f0"]
    assert (storage.kind, storage.speed_mbit, storage.driver, storage.numa_node) == ("ethernet", 200000, "mlx5_core", 0)
    assert [report.interface for report in network if report.default_route] == ["ens6f0"]
    assert {report.kind for report in network if report.interface.startswith("ibp")} == {"infiniband"}


def test_rdma_cards_come_in_the_order_of_their_numbers_with_ports(tmp_path: Path) -> None:
    cards = recorded_machine("dgx_a100", tmp_path).report().rdma
    assert [card.name for card in cards] == [f"mlx5_{number}" for number in range(12)]
    first, last = cards[0], cards[11]
    assert (first.interface, first.pci_address, first.numa_node) == ("ib0", "0000:0c:00.0", 3)
    (port,) = first.ports
    assert (port.number, port.layer, port.state, port.rate_gbit, port.link_downed) == (
        1,
        "InfiniBand",
        "ACTIVE",
        200,
        0,
    )
    assert (last.ports[0].state, last.ports[0].physical) == ("DOWN", "Polling")


def test_the_address_that_nccl_takes_is_told_with_its_index(tmp_path: Path) -> None:
    cards = recorded_machine("dgx_h100", tmp_path).report().rdma
    (infiniband,), (roce,), (unused,) = cards[0].ports, cards[1].ports, cards[7].ports
    assert (infiniband.gid_index, infiniband.gid) == (0, "fe80:0000:0000:0000:0000:0000:0000:0001")
    assert (roce.gid_index, roce.gid) == (3, "0000:0000:0000:0000:0000:ffff:0a21:000b")
    assert (unused.layer, unused.gid_index, unused.gid) == ("Ethernet", None, None)


@pytest.mark.parametrize(
    ("machine", "kinds"),
    [("aws_p5", {"EFA"}), ("dgx_h100", {"InfiniBand", "RoCE"}), ("l40s_pcie", {"RoCE"}), ("desktop", set[str]())],
)
def test_cards_are_told_by_what_they_speak(tmp_path: Path, machine: str, kinds: set[str]) -> None:
    cards = recorded_machine(machine, tmp_path).report().rdma
    assert {card.kind for card in cards} == kinds
    assert all(port.gid_index is None for card in cards if card.kind == "EFA" for port in card.ports)


def test_no_rdma_is_no_card(tmp_path: Path) -> None:
    assert read_rdma(tmp_path) == ()


def test_default_routes_are_those_to_everywhere() -> None:
    route = HEAD + "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    route += "eth1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    ipv6 = f"{NO_ROUTE} 00 {NO_ROUTE} 00 {NO_ROUTE} ffffffff 00000001 00000000 00200200       lo\n"
    ipv6 += f"{NO_ROUTE} 00 {NO_ROUTE} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eth2\n"
    assert default_routes(route, ipv6) == {"eth0", "eth2"}
    assert default_routes("", "rubbish\n") == frozenset()


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        (None, "ib0"),
        ("eth", "eth0"),
        ("=eth1", "eth1"),
        ("^ib,docker", "eth0"),
        ("^=eth0,ib0", "docker0"),
        ("wlan", None),
    ],
)
def test_nccl_takes_infiniband_first_and_what_its_variable_names(wish: str | None, chosen: str | None) -> None:
    network = [
        link("docker0", "172.17.0.1"),
        link("eth0", "10.0.0.5"),
        link("eth1", "10.1.0.5"),
        link("ib0", "10.2.0.5"),
    ]
    assert nccl_interface(network, {} if wish is None else {"NCCL_SOCKET_IFNAME": wish}) == chosen


def test_nccl_takes_docker_last_and_never_what_is_down_or_without_address() -> None:
    network = [link("docker0", "172.17.0.1"), link("eth0", "10.0.0.5", state="down"), link("ib0")]
    assert nccl_interface(network, {}) == "docker0"
    assert nccl_interface([], {}) is None


@pytest.mark.parametrize(
    ("hosts", "chosen"),
    [
        ("127.0.0.1 localhost\n10.0.0.5 box.lab box # mine\n", "eth0"),
        ("127.0.1.1 box\n", "lo"),
        ("10.9.9.9 box\n", None),
        ("10.0.0.5 boxer\n", None),
        ("", None),
    ],
)
def test_gloo_goes_where_the_hosts_own_name_leads(hosts: str, chosen: str | None) -> None:
    network = [link("eth0", "10.0.0.5"), link("eth1", "10.1.0.5")]
    assert gloo_interface(network, {}, hosts=hosts, host_name="box") == chosen
    assert gloo_interface(network, {"GLOO_SOCKET_IFNAME": "eth1,eth0"}, hosts=hosts, host_name="box") == "eth1"


def test_the_kernel_tells_the_loopback_address_of_this_machine() -> None:
    assert "127.0.0.1" in psutil_addresses()["lo"]
