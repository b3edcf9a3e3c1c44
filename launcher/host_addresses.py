"""Which addresses this host has, and at which of them others can be expected to reach it. Connects to nobody."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from dsrun.errors import DsrunError

#: Interfaces by which containers and virtual machines of one host talk; what is behind them is on that host.
_INNER = re.compile(
    r"(docker|podman|virbr|veth|vnet|lxc|lxdbr|cni|cali|flannel|cilium|weave|kube|nerdctl|vmnet|vboxnet|br-[0-9a-f]{12}$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of this host.

    Attributes:
        address: as text, without a scope.
        interface: whose it is.
        prefix: bits of its network; None where the kernel does not say.
        speed_mbit: of the interface's link; None where it does not say.
        unfit: why nobody should meet there, unless the user names the interface; None if it is fit.
    """

    address: str
    interface: str
    prefix: int | None
    speed_mbit: int | None
    unfit: str | None


def addresses() -> Iterator[Address]:
    """Yields this host's IPv4 and IPv6 addresses, interface by interface as the kernel numbers them."""
    import psutil

    stats = psutil.net_if_stats()
    numbers = {name: number for number, name in socket.if_nameindex()}
    for name, entries in sorted(psutil.net_if_addrs().items(), key=lambda item: numbers.get(item[0], 1 << 31)):
        is_up = name in stats and stats[name].isup
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                text = entry.address.partition("%")[0]
                yield Address(
                    address=text,
                    interface=name,
                    prefix=_prefix(text, entry.netmask),
                    speed_mbit=(stats[name].speed or None) if is_up else None,
                    unfit=why_unfit(text, name) if is_up else "the interface is down",
                )


def why_unfit(address: str, interface: str) -> str | None:
    """Says why no other host can be expected to reach an address; None if one may."""
    parsed = ip_address(address)
    if parsed.is_loopback:
        return "loopback"
    if parsed.version == 6 and parsed.is_link_local:
        return "link-local: its name differs from host to host"
    if _INNER.match(interface):
        return "a network of containers or virtual machines inside the host"
    return None


def of_interfaces(found: list[Address], named: list[str]) -> list[Address]:
    """Returns the addresses of the interfaces a user named, in the order of the names.

    Args:
        found: all there are.
        named: names; one that is no interface's stands for all interfaces that begin with it, as NCCL reads it.

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
