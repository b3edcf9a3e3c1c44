"""Which addresses this host has, and which of another host's it reaches. Answers for meeting; see [Note: questions].

An address counts as reached when a random word comes back from it: that a connection is accepted proves nothing, for
172.17.0.1 is docker's own address on every host that has docker. Chooses nothing.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from dsrun.errors import DsrunError

#: Longest wait for an address; two lost packets are repeated within it.
REACH_PATIENCE_S = 3.0
#: All hosts of a job may knock at the same moment.
_BACKLOG = 1024
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How an address of another host was reached from here.

    Attributes:
        source: this host's end of the connection.
        interface: whose address that is; None if nobody's.
        speed_mbit: of its link; None where it does not say.
    """

    source: str
    interface: str | None
    speed_mbit: int | None


def listen(arguments: Mapping[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Listens on this host's addresses until the survey is over; whoever connects is sent the word.

    Args:
        arguments: `word`, and `interfaces`, names of those to listen on or None: all that are fit.
        keep: ends it.

    Returns:
        `offers`, a list of `Address` with its `port`; `left_out`, a list of `Address`, `unfit` saying why.

    Raises:
        DsrunError: a named interface is not there, or has no address.
    """
    word = str(arguments["word"]).encode()
    named: list[str] | None = arguments["interfaces"]
    found = list(addresses())
    chosen = [entry for entry in found if entry.unfit is None] if named is None else of_interfaces(found, named)
    offers: list[dict[str, Any]] = []
    left_out = [asdict(entry) for entry in found if entry not in chosen]
    for entry in chosen:
        try:
            port = _serve(entry.address, word, keep)
        except OSError as error:
            # IPv6 addresses that the kernel still checks for duplicates, for one.
            left_out.append({**asdict(entry), "unfit": _why(error)})
        else:
            offers.append({**asdict(entry), "port": port})
    return {"offers": offers, "left_out": left_out}


def listen_at(arguments: Mapping[str, Any], keep: ExitStack) -> int:
    """Listens at one address until the survey is over; whoever connects is sent the word.

    Args:
        arguments: `word` and `address`.
        keep: ends it.

    Returns:
        the port.
    """
    return _serve(str(arguments["address"]), str(arguments["word"]).encode(), keep)


def reach(arguments: Mapping[str, Any], keep: ExitStack) -> list[dict[str, Any]]:
    """Tries addresses of other hosts, all at once.

    Args:
        arguments: `patience_s`, `targets`, a list of objects with `address` and `port`, and the `word` expected there,
            which a target may have of its own. `rest_s`: once one is reached, longest wait for the others, where they
            are other ways to the same host.
        keep: not needed.

    Returns:
        for each target: a `Reached`, or an object with `fault`, why it is none.
    """
    targets = [
        _Target(str(target["address"]), int(target["port"]), str(target.get("word", arguments.get("word"))))
        for target in arguments["targets"]
    ]
    patience_s = float(arguments["patience_s"])
    own = {entry.address: entry for entry in addresses()}
    answers: list[dict[str, Any]] = []
    for source in _knock(targets, patience_s, float(arguments.get("rest_s", patience_s))):
        if isinstance(source, _Fault):
            answers.append({"fault": source.reason})
        else:
            mine = own.get(source)
            interface, speed_mbit = (None, None) if mine is None else (mine.interface, mine.speed_mbit)
            answers.append(asdict(Reached(source=source, interface=interface, speed_mbit=speed_mbit)))
    return answers


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


@dataclass(frozen=True, slots=True)
class _Target:
    address: str
    port: int
    word: str


@dataclass(frozen=True, slots=True)
class _Fault:
    reason: str


def _prefix(address: str, netmask: str | None) -> int | None:
    if netmask is None:
        return None
    if ":" in address:
        return int(ip_address(netmask)).bit_count()
    return ip_network(f"0.0.0.0/{netmask}").prefixlen


def _serve(address: str, word: bytes, keep: ExitStack) -> int:
    """Sends the word to whoever connects, until the end; returns the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    keep.callback(listener.close)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    thread = threading.Thread(target=_send_to_all, args=(listener, word), daemon=True)
    thread.start()
    keep.callback(thread.join)
    # A thread that waits in `accept` is woken by this and not by a close.
    keep.callback(listener.shutdown, socket.SHUT_RDWR)
    return int(listener.getsockname()[1])


def _send_to_all(listener: socket.socket, word: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:
            return
        with connection:
            try:
                connection.sendall(word)
            except OSError:
                # Whoever it was is gone; that it was not reached is for itself to say.
                continue


def _knock(targets: list[_Target], patience_s: float, rest_s: float) -> list[str | _Fault]:
    """Connects to all targets at once and compares what they send; returns this host's end of each, or why not."""
    results: dict[int, str | _Fault] = {}
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for index, target in enumerate(targets):
            try:
                attempt = _Attempt(index, target)
            except OSError as error:
                # A kernel without IPv6.
                results[index] = _Fault(_why(error))
                continue
            stack.callback(attempt.socket.close)
            status = attempt.socket.connect_ex((target.address, target.port))
            if status in (0, errno.EINPROGRESS):
                selector.register(attempt.socket, selectors.EVENT_READ, attempt)
            else:
                results[index] = _Fault(os.strerror(status).lower())
        until_s = time.monotonic() + patience_s
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                attempt: _Attempt = key.data
                result = attempt.read()
                if result is None:
                    continue
                selector.unregister(attempt.socket)
                results[attempt.index] = result
                if isinstance(result, str):
                    until_s = min(until_s, time.monotonic() + rest_s)
    late = _Fault("no answer")
    return [results.get(index, late) for index in range(len(targets))]


class _Attempt:
    """A connection on its way."""

    def __init__(self, index: int, target: _Target) -> None:
        self.index = index
        self._word = target.word.encode()
        self.socket = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._heard = b""

    def read(self) -> str | _Fault | None:
        """Reads on; returns this host's end once the word is there, a fault once it cannot come, None until then."""
        try:
            data = self.socket.recv(len(self._word) + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            return _Fault(_why(error))
        self._heard += data
        if data and self._word.startswith(self._heard):
            return None
        if self._heard != self._word:
            return _Fault("something else answers there")
        return str(self.socket.getsockname()[0]).partition("%")[0]


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
