"""Binds an address or a name that all hosts of a job were given, on the host that it stands for. Chooses no address.

[Note: whose address] The address itself is bound, never all interfaces: the rendezvous store trusts whoever reaches it.
A name is resolved, and the first of its addresses that is this host's is taken. A name that stands for this host's
loopback only (Debian's 127.0.1.1) would leave the others alone, and is refused; a loopback address itself is taken as
it stands.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence

from dsrun.errors import LaunchError

from ..os_errors import refusal_of


def addresses_of(name: str) -> list[tuple[socket.AddressFamily, str]]:
    """Returns the addresses that a name stands for, in the resolver's order.

    Raises:
        socket.gaierror: the name is not known (yet).
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [(family, str(place[0])) for family, _, _, _, place in found]


def bind_own(
    address: str,
    port: int,
    *,
    resolve: Callable[[str], Sequence[tuple[socket.AddressFamily, str]]] = addresses_of,
) -> socket.socket:
    """Binds and listens where all hosts were told to come. See [Note: whose address].

    Args:
        address: address or host name to bind, which all hosts were given.
        port: port to listen on.
        resolve: function that returns the addresses of a name.

    Raises:
        socket.gaierror: the name is not known (yet).
        LaunchError: no address of it is this host's, or the port is taken.
    """
    taken_as_it_stands = _is_literal(address) or address == "localhost"
    passed_over: list[str] = []
    for family, own in resolve(address):
        if not taken_as_it_stands and ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            passed_over.append(f"{own} is for this host alone")
            continue
        try:
            return socket.create_server((own, port), family=family, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise LaunchError(
                    f"cannot listen on {place_of(own, port)}, where the other nodes come: {refusal_of(error)}",
                    hint="does another job run here? give all nodes another port",
                ) from error
            passed_over.append(f"{own} is no address of this host")
    raise LaunchError(
        f"cannot listen at {address}, where the other nodes come: {', '.join(dict.fromkeys(passed_over))}",
        hint="give all nodes an address of node 0, or a name that stands for one (in Kubernetes a headless service)",
    )


def place_of(address: str, port: int) -> str:
    """Writes an address and its port as one word."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_literal(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True
