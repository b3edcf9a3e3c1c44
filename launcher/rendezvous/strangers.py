"""Who is connected to the port where ranks meet and is none of the job, as the kernel of that host tells it.

torch's store accepts by itself and asks nobody who he is, so its host's agent looks at /proc/net/tcp and tcp6 now and
then. What connects and leaves between two looks is missed. Looks only: a connection is neither refused nor ended, and
where the tables cannot be read nothing is said.

[Note: strangers] To be told is only who is a stranger for sure. By address: who comes from none of the addresses that
the agents of all hosts told. By user: who comes from this host, and is another user's process. Neither is judged before
each host was seen with as many connections as it has ranks, from its own addresses, and this host's by this user:
behind a translation of addresses, in containers with networks of their own, or with ranks that run as another user,
that does not come about, and nothing is said of anybody. It does not either for ranks that never join. Of IPv6 a host's
whole /64 is its own, as it changes its address in it. An address that this host shares with another host of the job
(two hosts that are one machine) is not judged by user. Jobs whose nodes each have a dsrun of their own are not watched
after they gathered: their nodes may come over services that translate. What is left: a host that gets a new IPv4
address while the job runs, and then connects anew.
"""

from __future__ import annotations

import os
import pwd
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

from .bind import place_of

#: Strangers that are told; a scanner has many addresses.
MOST_TOLD = 16
#: Between two looks, and part of one core that they may cost together: a look takes the kernel a while on a host with
#: very many connections.
LOOK_S, _MOST_SHARE = 1.0, 0.01
#: Read of a table: some hundred thousand connections.
_MOST_BYTES = 32 << 20
#: Addresses that a host tells; load balancers give hosts thousands.
_MOST_ADDRESSES = 64
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
#: States, as the kernel numbers them: open, and closed by the other end only.
_ESTABLISHED, _CLOSE_WAIT = 1, 8

_Ip = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection on this host.

    Attributes:
        local: address of this end; an IPv4 address also where it was written as IPv6.
        local_port: port of this end.
        remote: the other end's.
        remote_port: port of the other end.
        is_open: neither end has closed it.
        user: number of who has this end.
    """

    local: _Ip
    local_port: int
    remote: _Ip
    remote_port: int
    is_open: bool
    user: int


@dataclass(frozen=True, slots=True)
class HostEnds:
    """How a host of the job may come.

    Attributes:
        addresses: addresses that the host told.
        ranks: number of ranks that the host has.
    """

    addresses: frozenset[_Ip]
    ranks: int

    @classmethod
    def of(cls, addresses: Iterable[str], ranks: int) -> HostEnds:
        """Reads addresses as `own_addresses` writes them."""
        return cls(frozenset(map(ip_address, addresses)), ranks)

    def has(self, address: _Ip) -> bool:
        """Whether an address is this host's, or may be; see [Note: strangers]."""
        return address in self.addresses or any(_are_near(address, each) for each in self.addresses)


@dataclass(frozen=True, slots=True)
class Stranger:
    """Who is connected and is none of the job.

    Attributes:
        address: address that the stranger connects from.
        port: port that the stranger connects from.
        user: number of the user that has the connecting process, on this host; None for another host's process.
    """

    address: _Ip
    port: int
    user: int | None


def own_addresses() -> list[str]:
    """Returns the addresses by which other hosts may see this one."""
    found = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family.name in ("AF_INET", "AF_INET6")
    ]
    return [text for text in dict.fromkeys(found) if not ip_address(text).is_loopback][:_MOST_ADDRESSES]


def read_connections(table: bytes, port: int) -> list[Connection]:
    """Reads the connections of which one end has a port.

    Args:
        table: contents of /proc/net/tcp or /proc/net/tcp6.
        port: port to look for; rows with other ports, which are most, are not read.
    """
    row = re.compile(
        rb"^ *\d+: ([0-9A-F]+):([0-9A-F]{4}) ([0-9A-F]+):([0-9A-F]{4}) (%02X|%02X) \S+ \S+ \S+ +(\d+) "
        % (_ESTABLISHED, _CLOSE_WAIT),
        re.MULTILINE,
    )
    needle = b":%04X " % port
    wanted = b"\n".join(line for line in table.split(b"\n") if needle in line)
    return [
        Connection(
            _address(local),
            int(local_port, 16),
            _address(remote),
            int(remote_port, 16),
            int(state, 16) == _ESTABLISHED,
            int(user),
        )
        for local, local_port, remote, remote_port, state, user in row.findall(wanted)
    ]


class StrangerJudge:
    """Says of connections to the store which are strangers', once it is sure. See [Note: strangers].

    Args:
        address: address of the rendezvous store.
        port: its port.
        own: addresses of this host and its number of ranks.
        others: all other hosts of the job; None while that is not known.
        user: number of the user that runs the job on this host.
    """

    def __init__(self, address: str, port: int, own: HostEnds, *, others: Sequence[HostEnds] | None, user: int) -> None:
        self._place = (_plain(ip_address(address.partition("%")[0])), port)
        self._own = own
        self.others = others
        self._user = user
        self._own_seen = False
        self._others_seen: set[int] = set()

    def judge(self, connections: Iterable[Connection]) -> list[Stranger]:
        """Returns the strangers among connections of the host of the store."""
        known = list(connections)
        served = [each for each in known if (each.local, each.local_port) == self._place]
        users = {
            (each.local, each.local_port): each.user
            for each in known
            if each.is_open and (each.remote, each.remote_port) == self._place
        }
        if self.others is None:
            return []
        here = [each for each in served if self._is_here(each.remote)]
        mine = [each for each in here if users.get((each.remote, each.remote_port)) == self._user]
        # The store's server is a client of its own, beside the ranks.
        self._own_seen = self._own_seen or len(mine) > self._own.ranks
        for index, host in enumerate(self.others):
            if sum(host.has(each.remote) for each in served) >= host.ranks:
                self._others_seen.add(index)
        if not self._own_seen or len(self._others_seen) < len(self.others):
            return []
        strangers: list[Stranger] = []
        for each in served:
            is_others = any(host.has(each.remote) for host in self.others)
            if each in here:
                user = users.get((each.remote, each.remote_port), self._user)
                if user != self._user and not is_others:
                    strangers.append(Stranger(each.remote, each.remote_port, user))
            elif not is_others:
                strangers.append(Stranger(each.remote, each.remote_port, None))
        return strangers

    def _is_here(self, address: _Ip) -> bool:
        return address.is_loopback or address == self._place[0] or self._own.has(address)


class StrangerWatch:
    """Looks now and then who is connected to the store that this host serves, and tells of strangers.

    Args:
        address: address of the rendezvous store, which is one of this host's.
        port: its port.
        ranks: number of ranks of this host.
        others: hosts of the job other than this one; None while they are not known. See `StrangerJudge`.
        tell: callback that gets a line for each address or user that is a stranger's, for the first sixteen.
    """

    def __init__(
        self, address: str, port: int, ranks: int, *, others: Sequence[HostEnds] | None, tell: Callable[[str], None]
    ) -> None:
        self._port = port
        self._store = place_of(address, port)
        self._judge = StrangerJudge(
            address, port, HostEnds.of(own_addresses(), ranks), others=others, user=os.geteuid()
        )
        self._tell = tell
        self._told: set[_Ip | int] = set()
        self._at_s = 0.0

    def meet(self, others: Sequence[HostEnds]) -> None:
        """Takes the other hosts of the job, once all have told who they are."""
        self._judge.others = others

    def look(self, now_s: float) -> None:
        """Looks, if it is time; costs no more than a hundredth of a core, however many connect.

        Args:
            now_s: monotonic.
        """
        if now_s < self._at_s or len(self._told) >= MOST_TOLD:
            return
        began_s = time.monotonic()
        connections = [each for table in _TABLES for each in read_connections(_read(table), self._port)]
        for stranger in self._judge.judge(connections):
            key = stranger.address if stranger.user is None else stranger.user
            if key not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(key)
                self._tell(stranger_line(stranger, self._store))
        self._at_s = now_s + max(LOOK_S / 2, (time.monotonic() - began_s) / _MOST_SHARE)


def stranger_line(stranger: Stranger, store: str) -> str:
    """Says who is connected, what that can do, and what helps.

    Args:
        stranger: stranger that is connected to the rendezvous store.
        store: address and port of the store.
    """
    place = place_of(str(stranger.address), stranger.port)
    who, way_out = "no host of this job", "keep others out with a firewall, or meet on another network with `--iface`"
    if stranger.user is not None:
        who = f"a process of another user, {_name(stranger.user)}"
        way_out = f"`ss -tnp sport = :{stranger.port}` as root names the process"
    return (
        f"a connection from {place} to {store}, where the ranks meet, is from {who}; torch's store there asks nobody "
        f"who they are, and whoever speaks its protocol can read and change what ranks tell each other: {way_out}"
    )


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)


def _address(text: bytes) -> _Ip:
    """Reads an address as the kernel writes it: words of 32 bits, each in the order of the machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    data = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _plain(ip_address(data))


def _plain(address: _Ip) -> _Ip:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _are_near(one: _Ip, other: _Ip) -> bool:
    return one.version == other.version == 6 and int(one) >> 64 == int(other) >> 64


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        # No IPv6, or no /proc.
        return b""
