"""Which addresses this host has, and at which of them others can be expected to reach it. Connects to nobody."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError

from ..machine.network.interfaces import default_routes
from ..machine.network.kinds import Kind, interface_kind
from ..machine.proc_files import read_text

#: Interfaces by which containers and virtual machines of one host talk, and overlays that lead to others' containers.
#: Bridges without a card are known by /sys; these are names that their makers give.
_INNER = re.compile(
    r"docker|podman|virbr|veth|vnet|lxc|lxdbr|incusbr|nerdctl|vmnet|vboxnet|br-[0-9a-f]{12}$|ifb\d|dummy"
    r"|cni|cali|vxlan(-v6)?\.calico$|wireguard\.cali|tunl\d|flannel|cilium|weave|kube|nodelocaldns"
    r"|antrea-|ovn-k8s|genev_sys|ovs-system$|br-int$|eni[0-9a-f]{11}$|azv[0-9a-f]{11}$|gke[0-9a-f]{11}$"
)
_INNER_WORDS = "a network of containers or virtual machines inside the host"
#: What a card of unknown speed is taken for. Cards of virtual machines (ENA, virtio, gVNIC) do not say theirs, and have
#: 10 Gbit/s and more where people train: above a card of 1 Gbit/s, below those that are known to be fast.
_CARD_MBIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """An interface at one end of a connection.

    Attributes:
        interface: its name; None where the end's address is no interface's.
        speed_mbit: speed of the interface's link in Mbit/s; None where nothing says.
        kind: kind of the interface, `card` or `tunnel` for example.
        driver: kernel driver of the interface's card; None without a card.
        cards: devices through which the interface's packets leave, as /sys names them.
    """

    interface: str | None
    speed_mbit: int | None
    kind: Kind = "virtual"
    driver: str | None = None
    cards: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cards", tuple(self.cards))  # JSON has lists only

    @property
    def taken_mbit(self) -> int:
        """What its speed is taken for where it is compared; a tunnel, which leads over another link, comes last."""
        if self.kind == "tunnel":
            return 0
        return self.speed_mbit or (_CARD_MBIT if self.cards else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address(LinkFacts):
    """An address of this host.

    Attributes:
        address: address as text, without a scope.
        interface: name of the interface that has the address.
        prefix: bits of its network; None where the kernel does not say.
        unfit: reason why nobody should meet at the address, unless the user names the interface; None if it is fit.
        default_route: packets to elsewhere leave by its interface.
    """

    address: str
    interface: str
    prefix: int | None
    unfit: str | None
    default_route: bool = False


@dataclass(frozen=True, slots=True)
class InterfaceAddresses:
    """An interface as psutil tells it.

    Attributes:
        name: name of the interface.
        is_up: whether the interface is up.
        speed_mbit: speed of the interface's link in Mbit/s; 0 if unknown.
        addresses: addresses of the interface, each with its netmask, or with None where there is none.
    """

    name: str
    is_up: bool
    speed_mbit: int
    addresses: tuple[tuple[str, str | None], ...]


def taken_mbit_of(offer: Mapping[str, Any]) -> int:
    """Returns `taken_mbit` of an `Address` that came as JSON."""
    return LinkFacts(**{name: offer[name] for name in LinkFacts.__dataclass_fields__}).taken_mbit


def addresses() -> Iterator[Address]:
    """Yields this host's IPv4 and IPv6 addresses, interface by interface as the kernel numbers them."""
    import psutil

    stats = psutil.net_if_stats()
    numbers = {name: number for number, name in socket.if_nameindex()}
    found = [
        InterfaceAddresses(
            name,
            name in stats and stats[name].isup,
            stats[name].speed if name in stats else 0,
            tuple((one.address, one.netmask) for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)),
        )
        for name, entries in psutil.net_if_addrs().items()
    ]
    return addresses_of(Path("/"), sorted(found, key=lambda one: numbers.get(one.name, 1 << 31)))


def addresses_of(root: Path, found: Iterable[InterfaceAddresses]) -> Iterator[Address]:
    """Yields the addresses of a host.

    Args:
        root: `/`, or a made-up tree with sys/class/net and proc/net.
        found: its interfaces, in the order wanted.
    """
    routes = default_routes(read_text(root / "proc/net/route") or "", read_text(root / "proc/net/ipv6_route") or "")
    for one in found:
        what = interface_kind(root, one.name)
        for text, netmask in one.addresses:
            address = text.partition("%")[0]
            unfit = "the interface is down"
            if one.is_up:
                unfit = why_unfit(address, one.name) or (_INNER_WORDS if what.kind == "inner" else None)
            yield Address(
                address=address,
                interface=one.name,
                prefix=_prefix(address, netmask),
                speed_mbit=(one.speed_mbit or what.speed_mbit) if one.is_up else None,
                unfit=unfit,
                kind=what.kind,
                driver=what.driver,
                cards=what.cards,
                default_route=one.name in routes,
            )


def why_unfit(address: str, interface: str) -> str | None:
    """Says why no other host can be expected to reach an address; None if one may."""
    parsed = ip_address(address)
    if parsed.is_loopback:
        return "loopback"
    if parsed.version == 6 and parsed.is_link_local:
        return "link-local: its name differs from host to host"
    if _INNER.match(interface):
        return _INNER_WORDS
    return None


def of_interfaces(found: Sequence[Address], named: Sequence[str]) -> list[Address]:
    """Returns the addresses of the interfaces a user named, in the order of the names.

    Args:
        found: all there are.
        named: names of interfaces; a name that no interface has stands for all interfaces that begin with it, as NCCL
            reads it.

    Raises:
        DsrunError: an interface is not there, or has no address that others could use.
    """
    usable = [entry for entry in found if not ip_address(entry.address).is_link_local or "." in entry.address]
    names = list(dict.fromkeys(entry.interface for entry in usable))
    chosen: list[Address] = []
    for name in named:
        matches = [name] if name in names else [other for other in names if other.startswith(name)]
        if not matches:
            shown = ", ".join(f"{entry.interface} ({entry.address})" for entry in usable)
            raise DsrunError(f"`--iface {name}`: no interface of that name has an address", hint=f"there is {shown}")
        chosen += [entry for match in matches for entry in usable if entry.interface == match and entry not in chosen]
    return chosen


def _prefix(address: str, netmask: str | None) -> int | None:
    if netmask is None:
        return None
    if ":" in address:
        return int(ip_address(netmask)).bit_count()
    return ip_network(f"0.0.0.0/{netmask}").prefixlen
