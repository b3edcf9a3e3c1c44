"""What an interface is stands in /sys, and not in its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.machine.network.kinds import interface_kind
from dsrun.launcher.rendezvous.host_addresses import InterfaceAddresses, addresses_of
from support.machines import recorded_machine
from support.topologies import write_tree

NET = "sys/class/net"


def a_card(
    root: Path, name: str, *, address: str, driver: str = "mlx5_core", speed: int = 100_000, **files: str
) -> None:
    device = root / "sys/devices/pci0000:00" / address
    (root / "sys/drivers" / driver).mkdir(parents=True, exist_ok=True)
    write_tree(device, {"net/.keep": "", "class": "0x020000\n"})
    (device / "driver").symlink_to(root / "sys/drivers" / driver)
    write_tree(root / NET / name, {"speed": f"{speed}\n", "type": "1\n", "uevent": f"INTERFACE={name}\n", **files})
    (root / NET / name / "device").symlink_to(device)


def below(root: Path, name: str, *lower: str, **files: str) -> None:
    write_tree(root / NET / name, {"type": "1\n", "uevent": f"INTERFACE={name}\n", **files})
    for one in lower:
        (root / NET / name / f"lower_{one}").symlink_to(root / NET / one)


def test_bonds_vlans_and_bridges_over_cards_know_their_cards(tmp_path: Path) -> None:
    a_card(tmp_path, "eth0", address="0000:41:00.0")
    a_card(tmp_path, "eth1", address="0000:41:00.1")
    below(tmp_path, "bond0", "eth0", "eth1", **{"bonding/mode": "802.3ad 4\n", "uevent": "DEVTYPE=bond\n"})
    below(tmp_path, "bond0.100", "bond0", uevent="DEVTYPE=vlan\nINTERFACE=bond0.100\n")
    below(tmp_path, "br0", "bond0.100", "vnet3", **{"bridge/bridge_id": "x\n"})
    below(tmp_path, "br1", "vnet4", **{"bridge/bridge_id": "x\n"})
    below(tmp_path, "macvlan0", "eth0")
    both = ("0000:41:00.0", "0000:41:00.1")
    found = {name: interface_kind(tmp_path, name) for name in ("eth0", "bond0", "bond0.100", "br0", "br1", "macvlan0")}
    assert {name: (one.kind, one.cards) for name, one in found.items()} == {
        "eth0": ("card", both[:1]),
        "bond0": ("bond", both),
        "bond0.100": ("vlan", both),
        "br0": ("bridge", both),
        "br1": ("inner", ()),
        "macvlan0": ("virtual", both[:1]),
    }
    assert found["br0"].speed_mbit == 100_000
    assert found["br0"].driver == "mlx5_core"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("tailscale0", {"type": "65534\n", "tun_flags": "0x1001\n"}),
        ("wg0", {"type": "65534\n", "uevent": "DEVTYPE=wireguard\n"}),
        ("ztabcdef12", {"type": "1\n", "tun_flags": "0x1002\n"}),
        ("campus", {"type": "1\n", "uevent": "DEVTYPE=vxlan\n"}),
        ("ipip7", {"type": "768\n"}),
        ("gre1", {"type": "778\n"}),
        ("ppp0", {"type": "512\n", "uevent": "DEVTYPE=ppp\n"}),
    ],
)
def test_tunnels_are_told_by_their_type_and_not_by_their_name(tmp_path: Path, name: str, files: dict[str, str]) -> None:
    write_tree(tmp_path / NET / name, files)
    assert interface_kind(tmp_path, name).kind == "tunnel"


def test_what_is_wireless_or_behind_usb_is_no_card_to_count_on(tmp_path: Path) -> None:
    a_card(tmp_path, "wlan0", address="0000:02:00.0", speed=-1, uevent="DEVTYPE=wlan\n")
    a_card(tmp_path, "usb0", address="0000:03:00.0", speed=-1)
    (tmp_path / "sys/bus/usb").mkdir(parents=True)
    (tmp_path / NET / "usb0/device/subsystem").symlink_to(tmp_path / "sys/bus/usb")
    for name in ("wlan0", "usb0"):
        assert (interface_kind(tmp_path, name).kind, interface_kind(tmp_path, name).cards) == ("peripheral", ())


def test_virtual_functions_of_one_port_are_one_card(tmp_path: Path) -> None:
    a_card(tmp_path, "eth0v0", address="0000:41:00.2")
    a_card(tmp_path, "eth0v1", address="0000:41:00.3")
    for name in ("eth0v0", "eth0v1"):
        os.symlink(tmp_path / "sys/devices/pci0000:00/0000:41:00.0", tmp_path / NET / name / "device/physfn")
    (tmp_path / "sys/devices/pci0000:00/0000:41:00.0").mkdir()
    assert interface_kind(tmp_path, "eth0v0").cards == interface_kind(tmp_path, "eth0v1").cards == ("0000:41:00.0",)


def test_an_interface_that_sys_does_not_show_is_virtual(tmp_path: Path) -> None:
    assert interface_kind(tmp_path, "eth0").kind == "virtual"


def taken(machine: str, root: Path) -> dict[str, int]:
    """What the speeds of a recorded machine's interfaces are taken for; the kernel itself is asked for none."""
    made = recorded_machine(machine, root)
    found = [
        InterfaceAddresses(name, True, 0, tuple((address, "255.255.255.0") for address in entries))
        for name, entries in made.addresses.items()
    ]
    return {one.interface: one.taken_mbit for one in addresses_of(root, found) if one.unfit is None}


def test_ip_over_infiniband_is_as_fast_as_its_port_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    found = taken("azure_nd_h100_v5", tmp_path)
    assert found.pop("eth0") == 100_000
    assert set(found.values()) == {400_000}
    assert len(found) == 8


def test_a_card_of_unknown_speed_is_above_one_of_1_gbit_and_below_fast_ones(tmp_path: Path) -> None:
    assert taken("aws_p5", tmp_path) == {"enp71s0": 10_000, "enp139s0": 10_000}


def test_known_speeds_and_default_routes_are_read(tmp_path: Path) -> None:
    assert taken("desktop", tmp_path) == {"enp11s0": 2500}
    (one,) = addresses_of(tmp_path, [InterfaceAddresses("enp11s0", True, 0, (("192.168.178.20", "255.255.255.0"),))])
    assert (one.default_route, one.prefix, one.kind, one.driver) == (True, 24, "card", "igc")
