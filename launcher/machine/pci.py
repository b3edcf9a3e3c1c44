"""PCI devices as /sys tells them: their place in the tree, their link and node, and how far two are apart.

Distances have the names of `nvidia-smi topo -m`, for people know them. They are read off the tree, not asked of the
driver, so that network cards and NVMe drives are placed by the same rule as GPUs.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .proc_files import is_there, read_text, resolved

#: Nearest first: see `path_class`.
PathClass = Literal["X", "PIX", "PXB", "PHB", "NODE", "SYS"]

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: A switch has an upstream port and one downstream port a device: so deep is a device below what it shares.
_ONE_SWITCH = 2
#: GT/s of a lane -> generation.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """A device's link, now and at most; None where the device or its driver does not say.

    Attributes:
        generation: PCIe generation of the link now, which may fall while the device idles; None where it is not known.
        width: lanes; it does not fall by itself.
    """

    generation: int | None
    width: int | None
    generation_max: int | None
    width_max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPlace:
    """Where a device is.

    Attributes:
        address: `0000:1b:00.0`.
        root: the host bridge, `pci0000:15`.
        bridges: addresses of ports and switches from the root to the device, which is the last.
        numa_node: None where the kernel knows none.
    """

    address: str
    root: str
    bridges: tuple[str, ...]
    numa_node: int | None


def pci_address(text: str) -> str | None:
    """Returns an address as the kernel writes it: four digits of domain, lower case; NVML writes eight, upper case."""
    low = text.strip().lower()
    if not _ADDRESS.fullmatch(low):
        return None
    domain, _, rest = low.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def place_of(folder: Path) -> PciPlace | None:
    """Finds a device in the tree of bridges.

    Args:
        folder: folder of the device in /sys, or a link to it; None is returned for one that is no PCI device.
    """
    parts = resolved(folder).parts
    chain = [part for part in parts if _ADDRESS.fullmatch(part)]
    root = next((part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), "")
    if not chain:
        return None
    # Below a PCI device stand its own children (`virtio0/net/eth0`, `nvme/nvme0`): the last address is the device.
    last = parts.index(chain[-1])
    return PciPlace(
        address=chain[-1], root=root, bridges=tuple(chain), numa_node=read_number(Path(*parts[: last + 1], "numa_node"))
    )


def place_of_address(root: Path, address: str) -> PciPlace | None:
    """Finds a device by its address.

    Args:
        root: `/`, or a made-up tree.
        address: `0000:1b:00.0`.
    """
    folder = root / "sys/bus/pci/devices" / address
    return place_of(folder) if is_there(folder) else None


def read_link(folder: Path) -> PcieLink:
    """Reads the link of a device from its folder in /sys."""
    return PcieLink(
        generation=generation_of(read_text(folder / "current_link_speed")),
        width=read_number(folder / "current_link_width"),
        generation_max=generation_of(read_text(folder / "max_link_speed")),
        width_max=read_number(folder / "max_link_width"),
    )


def generation_of(speed: str | None) -> int | None:
    """Returns the generation of a speed as the kernel writes it: `16.0 GT/s PCIe` is 4."""
    match = re.match(r"([0-9.]+) GT/s", speed or "")
    return None if match is None else _GENERATIONS.get(float(match.group(1)))


def path_class(one: PciPlace, other: PciPlace) -> PathClass:
    """Tells how two devices reach each other.

    Returns:
        `X` themselves; `PIX` over one switch at most; `PXB` over several, but not the host; `PHB` over the host
        bridge; `NODE` over two host bridges of one NUMA node; `SYS` between NUMA nodes.

    Source: the legend of `nvidia-smi topo -m`; the rule is NCCL's (pciDistance, src/misc/topo.cc of NCCL 2.4).
    """
    if one.address == other.address:
        return "X"
    if not one.root or one.root != other.root:
        # A machine of one node has devices of no node, and they are one.
        return "NODE" if one.numa_node == other.numa_node else "SYS"
    pairs = zip(one.bridges, other.bridges, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Functions of one card share all but the last digit, with no bridge between them.
    if one.address.rpartition(".")[0] == other.address.rpartition(".")[0]:
        return "PIX"
    if shared == 0:
        return "PHB"
    return "PIX" if max(len(one.bridges), len(other.bridges)) - shared <= _ONE_SWITCH else "PXB"


def read_number(path: Path) -> int | None:
    """Reads a file that holds one number; None for -1, with which the kernel says that it does not know."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None
