"""What a network interface is: a card, something over cards, a tunnel, or the inside of this host. Reads /sys only.

Names lie: `br0` may hold the host's only address or be a bridge of containers, `eth0` of a pod is no card. The kernel
tells what it knows: a card has a device, a bond, VLAN or bridge lists what lies below it, a tunnel has a type of its
own. Which interface is fit or best is for others to say.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..pci import read_number
from ..proc_files import is_there, read_text

#: `card` is a network card, also that of a virtual machine; `peripheral` one behind USB or without a cable, which may
#: be anything; `bond`, `vlan` and `bridge` have a card below them; `tunnel` leads over another interface (VPNs,
#: overlays); `inner` is a bridge with nothing but containers or virtual machines on it; `virtual` is all else, as a
#: container's own end.
Kind = Literal["card", "peripheral", "bond", "vlan", "bridge", "virtual", "tunnel", "inner"]

#: ARPHRD_ numbers of <linux/if_arp.h>: PPP, IPv4 and IPv6 in IP, SIT, GRE over either, and none at all, which is what
#: WireGuard and TUN have.
_TUNNEL_TYPES = (512, 768, 769, 776, 778, 823, 65534)
_TUNNEL_DEVTYPES = ("vxlan", "geneve", "wireguard", "bareudp", "gtp", "ppp", "amt")
_WIRELESS_DEVTYPES = ("wlan", "wwan")
#: Of tethered phones, board controllers and adapters; all others (PCI, virtio, vmbus, SoCs) have cards.
_PERIPHERAL_BUSES = ("usb", "sdio")
#: Bridges over bonds over cards; the kernel allows 8.
_DEEPEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceKind:
    """What an interface is.

    Attributes:
        kind: kind of the interface, `card` or `tunnel` for example; see `Kind`.
        driver: kernel driver of the card, or of the first card below the interface; None where there is no card.
        cards: devices through which its packets leave, as /sys names them (a PCI address); those that share a port of
            one card have one name.
        speed_mbit: speed of the interface's link in Mbit/s; None where neither the kernel nor the InfiniBand port says.
    """

    kind: Kind
    driver: str | None
    cards: tuple[str, ...]
    speed_mbit: int | None


def interface_kind(root: Path, name: str, *, depth: int = 0) -> InterfaceKind:
    """Looks an interface up.

    Args:
        root: `/`, or a made-up tree with sys/class/net.
        name: name of the interface; one that /sys does not show is `virtual`.
        depth: number of interfaces that lie above this one.
    """
    folder = root / "sys/class/net" / name
    devtype = _devtype(folder)
    if is_there(folder / "device"):
        driver = _link_name(folder / "device/driver")
        if devtype in _WIRELESS_DEVTYPES or _link_name(folder / "device/subsystem") in _PERIPHERAL_BUSES:
            return InterfaceKind(kind="peripheral", driver=driver, cards=(), speed_mbit=_speed(folder))
        return InterfaceKind(kind="card", driver=driver, cards=(_card(folder),), speed_mbit=_speed(folder))
    if _is_tunnel(folder, devtype):
        return InterfaceKind(kind="tunnel", driver=None, cards=(), speed_mbit=None)
    below = [] if depth >= _DEEPEST else [interface_kind(root, lower, depth=depth + 1) for lower in _lower(folder)]
    with_cards = [lower for lower in below if lower.cards]
    kind: Kind = "virtual"
    if is_there(folder / "bridge"):
        kind = "bridge" if with_cards else "inner"
    elif is_there(folder / "bonding") or devtype == "bond":
        kind = "bond"
    elif devtype == "vlan":
        kind = "vlan"
    speeds = [lower.speed_mbit for lower in with_cards if lower.speed_mbit is not None]
    return InterfaceKind(
        kind=kind,
        driver=with_cards[0].driver if with_cards else None,
        cards=tuple(card for lower in with_cards for card in lower.cards),
        speed_mbit=_speed(folder) or max(speeds, default=None),
    )


def _devtype(folder: Path) -> str | None:
    match = re.search(r"^DEVTYPE=(\S+)$", read_text(folder / "uevent") or "", re.MULTILINE)
    return None if match is None else match.group(1)


def _is_tunnel(folder: Path, devtype: str | None) -> bool:
    return (
        devtype in _TUNNEL_DEVTYPES or is_there(folder / "tun_flags") or read_number(folder / "type") in _TUNNEL_TYPES
    )


def _lower(folder: Path) -> list[str]:
    """Returns the names of the interfaces right below one."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    return sorted(entry.removeprefix("lower_") for entry in entries if entry.startswith("lower_"))


def _link_name(path: Path) -> str | None:
    """Returns the name of what a link leads to; None where there is no link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def _card(folder: Path) -> str:
    """Names the device; virtual functions share the wire of the physical one, and its name."""
    device = folder / "device"
    physical = device / "physfn"
    return os.path.basename(os.path.realpath(physical if is_there(physical) else device))


def _speed(folder: Path) -> int | None:
    """Reads the link's speed; many drivers of virtual machines and of InfiniBand say -1, or nothing."""
    speed = read_number(folder / "speed")
    return speed if speed is not None and speed > 0 else _port_speed(folder)


def _port_speed(folder: Path) -> int | None:
    """Reads the rate of the RDMA port that an interface stands on: IP over InfiniBand, or Ethernet with RoCE."""
    port = (read_number(folder / "dev_port") or 0) + 1
    try:
        names = os.listdir(folder / "device/infiniband")
    except OSError:
        return None
    for name in sorted(names):
        ports = folder / "device/infiniband" / name / "ports"
        text = read_text(ports / str(port) / "rate") or read_text(ports / "1/rate")
        match = re.match(r"([0-9.]+) Gb/sec", text or "")
        if match is not None:
            return int(float(match.group(1)) * 1000)
    return None
