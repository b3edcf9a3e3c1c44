from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.pci import (
    PcieLink,
    PciPlace,
    generation_of,
    path_class,
    pci_address,
    place_of,
    place_of_address,
    read_link,
    read_number,
)
from support.topologies import write_tree


def place(root: str, *chain: str, node: int | None = 0) -> PciPlace:
    return PciPlace(address=chain[-1], root=root, bridges=chain, numa_node=node)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (place("r", "a.0"), place("r", "a.0"), "X"),
        # Behind one switch: its upstream port is shared, downstream ports are not.
        (place("r", "p", "up", "d1", "g1.0"), place("r", "p", "up", "d2", "g2.0"), "PIX"),
        (place("r", "p", "up", "d1", "g1.0"), place("r", "p", "up", "d2", "up2", "d3", "g2.0"), "PXB"),
        (place("r", "p", "n.0"), place("r", "p", "n.1"), "PIX"),
        (place("r", "p1", "g1.0"), place("r", "p2", "g2.0"), "PHB"),
        (place("r", "v1.0"), place("r", "v2.0"), "PHB"),
        (place("r", "p", "g1.0"), place("s", "q", "g2.0"), "NODE"),
        (place("r", "p", "g1.0"), place("s", "q", "g2.0", node=1), "SYS"),
        # A machine of one node tells no node of its devices.
        (place("r", "p", "g1.0", node=None), place("s", "q", "g2.0", node=None), "NODE"),
        (place("r", "p", "g1.0", node=None), place("s", "q", "g2.0"), "SYS"),
    ],
)
def test_distances_have_the_names_of_nvidia_smi(one: PciPlace, other: PciPlace, words: str) -> None:
    assert path_class(one, other) == path_class(other, one) == words


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00010000:07:00.0", "10000:07:00.0"),
        ("", None),
        ("1b:00.0", None),
        ("0000:1b:00", None),
    ],
)
def test_addresses_are_written_as_the_kernel_does(text: str, address: str | None) -> None:
    assert pci_address(text) == address


def test_a_device_is_placed_by_what_its_link_leads_to(tmp_path: Path) -> None:
    chain = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"
    write_tree(tmp_path, {f"{chain}/numa_node": "1\n", f"{chain}/virtio0/net/eth0/mtu": "1500\n"})
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:16:00.0").symlink_to(tmp_path / chain)
    found = PciPlace(address="0000:16:00.0", root="pci0000:15", bridges=("0000:15:01.0", "0000:16:00.0"), numa_node=1)
    assert place_of_address(tmp_path, "0000:16:00.0") == found
    assert place_of(tmp_path / chain / "virtio0/net/eth0") == found
    assert place_of_address(tmp_path, "0000:17:00.0") is None
    assert place_of(tmp_path / "sys/devices/virtual/net/lo") is None


def test_a_link_is_read_now_and_at_most(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "current_link_speed": "2.5 GT/s PCIe\n",
            "current_link_width": "8\n",
            "max_link_speed": "32.0 GT/s PCIe\n",
            "max_link_width": "16\n",
        },
    )
    assert read_link(tmp_path) == PcieLink(generation=1, width=8, generation_max=5, width_max=16)
    nothing = PcieLink(generation=None, width=None, generation_max=None, width_max=None)
    assert read_link(tmp_path / "gone") == nothing


@pytest.mark.parametrize(
    ("speed", "generation"), [("8 GT/s", 3), ("16.0 GT/s PCIe\n", 4), ("Unknown", None), (None, None), ("7 GT/s", None)]
)
def test_speeds_of_older_and_newer_kernels_name_a_generation(speed: str | None, generation: int | None) -> None:
    assert generation_of(speed) == generation


def test_the_kernels_minus_one_is_no_number(tmp_path: Path) -> None:
    write_tree(tmp_path, {"node": "-1\n", "width": "0\n"})
    assert (read_number(tmp_path / "node"), read_number(tmp_path / "width")) == (None, 0)
