"""Network interfaces and RDMA devices, and which of them NCCL and Gloo take if nothing tells them. Sends nothing."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..known_fields import known_fields
from ..pci import place_of, read_number
from ..proc_files import is_there, read_text

#: Interface -> its addresses.
Addresses = Mapping[str, Sequence[str]]

_INFINIBAND_TYPE = "32"
#: An IPv4 address as a GID.
_IPV4_GID = "0000:0000:0000:0000:0000:ffff:"
#: Tables have 256 entries; two a protocol and address are used, the first ones.
_MOST_GIDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkReport:
    """One interface that is a card, or has an address others may reach; loopback is left out.

    Attributes:
        interface: its name.
        kind: `ethernet` and `infiniband` are cards; `virtual` is a bridge, bond, tunnel or container's end.
        state: state of the interface in the kernel's words, `up` or `down`, or `unknown` for some that work; None where
            it cannot be read.
        mtu: bytes of a packet.
        speed_mbit: speed of the link in Mbit/s; None where the kernel does not say.
        driver: the card's.
        addresses: IPv4 and IPv6, without link-local ones.
        default_route: packets to elsewhere leave here.
        numa_node: the node the card is wired to.
    """

    interface: str
    kind: Literal["ethernet", "infiniband", "virtual"]
    state: str | None
    mtu: int | None
    speed_mbit: int | None
    driver: str | None
    addresses: tuple[str, ...]
    default_route: bool
    numa_node: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE card.

    Attributes:
        number: counted from 1.
        layer: `InfiniBand`, or `Ethernet` for RoCE; `Unknown` for EFA.
        state: `ACTIVE` is the one that works.
        physical: `LinkUp`, `Polling`, `Disabled`.
        rate_gbit: rate of the link in Gbit/s; None where the kernel does not say.
        link_downed: number of times the link was lost since the counters were reset; None where the kernel does not
            say.
        symbol_errors: received wrong.
        gid_index: entry of the table of addresses that NCCL takes: the first on InfiniBand, RoCE v2 over IPv4 on
            Ethernet. Hosts whose entries differ set NCCL_IB_GID_INDEX.
        gid: GID (address of the port) at `gid_index`; None where there is no such index.
    """

    number: int
    layer: str | None
    state: str | None
    physical: str | None
    rate_gbit: float | None
    link_downed: int | None
    symbol_errors: int | None
    gid_index: int | None
    gid: str | None

    @property
    def is_up(self) -> bool:
        """Whether it works."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """A card that does RDMA.

    Attributes:
        kind: `InfiniBand` and `RoCE` are NCCL's own network, `EFA` (AWS) is a plugin's; None where no port says.
        may_open: programs here can open it. /sys shows containers every card of their host; the files in
            /dev/infiniband are for those that were given the cards.
    """

    name: str
    kind: Literal["InfiniBand", "RoCE", "EFA"] | None
    firmware: str | None
    interface: str | None
    pci_address: str | None
    numa_node: int | None
    ports: tuple[RdmaPort, ...]
    may_open: bool = True

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RdmaDevice:
        """Makes a device of its JSON form."""
        known = known_fields(cls, value)
        known["ports"] = tuple(RdmaPort(**known_fields(RdmaPort, port)) for port in value["ports"])
        return cls(**known)

    @property
    def is_up(self) -> bool:
        """Whether a port of it works."""
        return any(port.is_up for port in self.ports)

    @property
    def works(self) -> bool:
        """Whether a port of it works, and programs here can open it."""
        return self.may_open and self.is_up


def psutil_addresses() -> Addresses:
    """Asks the kernel for the addresses of every interface.

    Raises:
        OSError: it does not answer.
    """
    import psutil

    return {
        name: [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }


def read_network(root: Path, addresses: Addresses) -> tuple[NetworkReport, ...]:
    """Reads the interfaces, by name.

    Args:
        root: `/`, or a made-up tree with sys/class/net and proc/net.
        addresses: addresses of every interface.
    """
    routes = default_routes(read_text(root / "proc/net/route") or "", read_text(root / "proc/net/ipv6_route") or "")
    folder = root / "sys/class/net"
    reports = (
        _interface(folder / name, addresses.get(name, ()), default_route=name in routes)
        for name in sorted({*_names(folder), *addresses})
        # `bonding_masters` is a file among the folders.
        if name != "lo" and (os.path.isdir(folder / name) or name in addresses)
    )
    return tuple(report for report in reports if report.kind != "virtual" or report.addresses)


def read_rdma(root: Path) -> tuple[RdmaDevice, ...]:
    """Reads the InfiniBand and RoCE cards, in the order of their numbers."""
    folder = root / "sys/class/infiniband"
    opened = _open_cards(root)
    return tuple(_rdma(folder / name, may_open=name in opened) for name in sorted(_names(folder), key=_natural))


def default_routes(route: str, ipv6_route: str) -> frozenset[str]:
    """Returns the interfaces of default routes, of the texts of /proc/net/route and /proc/net/ipv6_route."""
    rows = [line.split() for line in route.splitlines()[1:]]
    found = {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"}
    rows = [line.split() for line in ipv6_route.splitlines()]
    # The kernel keeps an unreachable default on `lo` as well.
    found |= {row[9] for row in rows if len(row) > 9 and row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo"}
    return frozenset(found)


def nccl_interface(network: Sequence[NetworkReport], environ: Mapping[str, str]) -> str | None:
    """Returns the interface NCCL bootstraps over: its variable, else InfiniBand's, else the first, docker's last.

    Source: ncclFindInterfaces (src/misc/socket.cc of NCCL).
    """
    up = [link for link in network if link.addresses and link.state != "down"]
    wish = environ.get("NCCL_SOCKET_IFNAME")
    if wish:
        return next((link.interface for link in up if _wished(link.interface, wish)), None)
    ranked = sorted(up, key=lambda link: (not link.interface.startswith("ib"), link.interface.startswith("docker")))
    return ranked[0].interface if ranked else None


def gloo_interface(
    network: Sequence[NetworkReport], environ: Mapping[str, str], *, hosts: str, host_name: str
) -> str | None:
    """Returns the interface Gloo listens on: its variable, else the one the host's own name leads to.

    Args:
        network: interfaces of this machine.
        environ: environment variables, of which GLOO_SOCKET_IFNAME is read.
        hosts: text of /etc/hosts; no name server is asked.
        host_name: host name of this machine.

    Returns:
        `lo` where the name leads to 127.0.1.1, as Debian writes it: other hosts cannot reach that; None if the file
        does not name the host.
    """
    wish = environ.get("GLOO_SOCKET_IFNAME")
    if wish:
        return wish.split(",")[0]
    address = next((words[0] for words in hosts_rows(hosts) if host_name in words[1:]), None)
    if address is None:
        return None
    if address.startswith("127.") or address == "::1":
        return "lo"
    return next((link.interface for link in network if address in link.addresses), None)


def hosts_rows(text: str) -> list[list[str]]:
    """Reads /etc/hosts: address and names of each line."""
    return [words for line in text.splitlines() if len(words := line.partition("#")[0].split()) > 1]


def _interface(folder: Path, addresses: Sequence[str], *, default_route: bool) -> NetworkReport:
    card = is_there(folder / "device")
    infiniband = (read_text(folder / "type") or "").strip() == _INFINIBAND_TYPE
    place = place_of(folder / "device") if card else None
    return NetworkReport(
        interface=folder.name,
        kind="infiniband" if infiniband else "ethernet" if card else "virtual",
        state=(read_text(folder / "operstate") or "").strip() or None,
        mtu=read_number(folder / "mtu"),
        speed_mbit=read_number(folder / "speed"),
        driver=_target(folder / "device/driver"),
        addresses=tuple(
            address for address in addresses if not address.startswith(("127.", "fe80:")) and address != "::1"
        ),
        default_route=default_route,
        numa_node=None if place is None else place.numa_node,
    )


def _open_cards(root: Path) -> frozenset[str]:
    """Returns the names of the RDMA cards whose files this process may open, as libibverbs does."""
    verbs = root / "sys/class/infiniband_verbs"
    return frozenset(
        (read_text(verbs / name / "ibdev") or "").strip()
        for name in _names(verbs)
        if os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK)
    )


def _rdma(folder: Path, *, may_open: bool) -> RdmaDevice:
    place = place_of(folder / "device")
    ports = tuple(_port(folder / "ports" / name) for name in sorted(_names(folder / "ports"), key=_natural))
    return RdmaDevice(
        name=folder.name,
        kind=_kind(_target(folder / "device/driver"), [port.layer for port in ports]),
        firmware=(read_text(folder / "fw_ver") or "").strip() or None,
        interface=next(iter(sorted(_names(folder / "device/net"))), None),
        pci_address=None if place is None else place.address,
        numa_node=None if place is None else place.numa_node,
        ports=ports,
        may_open=may_open,
    )


def _kind(driver: str | None, layers: Sequence[str | None]) -> Literal["InfiniBand", "RoCE", "EFA"] | None:
    """Tells EFA by its driver: of its link layer the kernel says `Unknown`, and libibverbs `Unspecified`."""
    if driver == "efa":
        return "EFA"
    if "InfiniBand" in layers:
        return "InfiniBand"
    return "RoCE" if "Ethernet" in layers else None


def _port(folder: Path) -> RdmaPort:
    layer = (read_text(folder / "link_layer") or "").strip() or None
    index = _gid_index(folder, layer)
    rate = re.match(r"([0-9.]+) Gb/sec", read_text(folder / "rate") or "")
    return RdmaPort(
        number=int(folder.name) if folder.name.isdecimal() else 0,
        layer=layer,
        state=_after_colon(folder / "state"),
        physical=_after_colon(folder / "phys_state"),
        rate_gbit=None if rate is None else float(rate.group(1)),
        link_downed=read_number(folder / "counters/link_downed"),
        symbol_errors=read_number(folder / "counters/symbol_error"),
        gid_index=index,
        gid=None if index is None else (read_text(folder / f"gids/{index}") or "").strip(),
    )


def _gid_index(folder: Path, layer: str | None) -> int | None:
    if layer == "InfiniBand":
        return 0 if is_there(folder / "gids/0") else None
    if layer != "Ethernet":
        return None
    for index in range(_MOST_GIDS):
        # An entry that is not in use cannot be read.
        kind = read_text(folder / f"gid_attrs/types/{index}")
        if kind is None or kind.strip() != "RoCE v2":
            continue
        if (read_text(folder / f"gids/{index}") or "").startswith(_IPV4_GID):
            return index
    return None


def _after_colon(path: Path) -> str | None:
    """Reads `4: ACTIVE`."""
    return (read_text(path) or "").partition(":")[2].strip() or None


def _target(link: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """Sorts mlx5_2 before mlx5_10."""
    return tuple((text, int(number or 0)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", name))


def _wished(interface: str, wish: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME names an interface: beginnings of names, `=` for whole ones, `^` for all others."""
    negated, exact = wish.startswith("^"), wish.lstrip("^").startswith("=")
    names = wish.lstrip("^").lstrip("=").split(",")
    hit = any(interface == name if exact else interface.startswith(name) for name in names if name)
    return hit != negated
