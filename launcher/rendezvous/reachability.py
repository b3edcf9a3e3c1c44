"""Which of another host's addresses this one reaches. Answers for `address.py`, `all_pairs.py`; see [Note: questions].

An address counts as reached when a random word comes back from it: that a connection is accepted proves nothing, for
172.17.0.1 is docker's own address on every host that has docker. Chooses nothing.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..machine.network.interfaces import read_rdma
from ..machine.network.nccl_sockets import read_no_sockets
from .host_addresses import LinkFacts, addresses, of_interfaces

#: Longest wait for an address; two lost packets are repeated within it.
REACH_PATIENCE_S = 3.0
#: For a host to answer beyond what it waits for.
ANSWER_PATIENCE_S = 10.0
#: Of a large job each host tries only those that follow it in rank order, where NCCL's rings and trees mostly go.
_MOST_TARGETS = 64
#: All hosts of a job may knock at the same moment.
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached(LinkFacts):
    """How an address of another host was reached from here.

    Attributes:
        source: address of this host's end of the connection.
        interface: name of the interface that has the address `source`; None if no interface has it.
    """

    source: str


def listen(arguments: Mapping[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Listens on this host's addresses until the survey is over; whoever connects is sent the word.

    Args:
        arguments: `word`, and `interfaces`, names of those to listen on or None: all that are fit.
        keep: exit stack of the survey; at its end the listening ends.

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
            port = _say_at(entry.address, word, keep)
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
        keep: exit stack of the survey; at its end the listening ends.

    Returns:
        the port.
    """
    return _say_at(str(arguments["address"]), str(arguments["word"]).encode(), keep)


def listen_rails(arguments: Mapping[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Listens at several addresses until the survey is over; whoever connects is sent the word.

    Args:
        arguments: `word`, `addresses`, and `env`, variables that ranks of this host get beside its own.
        keep: exit stack of the survey; at its end the listening ends.

    Returns:
        `ports`, one an address; `no_sockets`, why NCCL takes no sockets on this host, or others than dsrun finds; None
        if it takes these. Where there is a reason, there are no ports.
    """
    environ = {**os.environ, **arguments["env"]}
    reason = read_no_sockets(Path("/"), environ, read_rdma(Path("/")))
    if "NCCL_SOCKET_IFNAME" in environ:
        reason = "NCCL_SOCKET_IFNAME is set"
    word = str(arguments["word"]).encode()
    ports = [] if reason is not None else [_say_at(str(address), word, keep) for address in arguments["addresses"]]
    return {"ports": ports, "no_sockets": reason}


def reach(arguments: Mapping[str, Any], keep: ExitStack) -> list[dict[str, Any]]:
    """Tries addresses of other hosts, all at once.

    Args:
        arguments: `patience_s`, `targets`, a list of objects with `address` and `port`, and the `word` expected there,
            which a target may have of its own. `rest_s`: once one is reached, longest wait for the others, where they
            are other ways to the same host.
        keep: exit stack of the survey; not needed here.

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
            known: dict[str, Any] = {"interface": None, "speed_mbit": None}
            if mine is not None:
                known = {name: getattr(mine, name) for name in LinkFacts.__dataclass_fields__}
            answers.append(asdict(Reached(source=source, **known)))
    return answers


def following(names: Sequence[str], name: str) -> list[str]:
    """Returns whom a host of a job tries: all others, or those that follow it.

    Args:
        names: names of all hosts of the job, in rank order.
        name: name of the host that tries the others.
    """
    index = names.index(name)
    return [*names[index + 1 :], *names[:index]][:_MOST_TARGETS]


def serve_at(address: str, serve: Callable[[socket.socket], None], keep: ExitStack) -> int:
    """Listens at one address, on a port that the kernel chooses.

    Args:
        address: address of this host to listen at.
        serve: function that gets each connection as it comes, one after the other, on a thread of the listener; it
            closes the connection.
        keep: exit stack; at its end the listening ends.

    Returns:
        the port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    keep.callback(listener.close)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    thread = threading.Thread(target=_accept, args=(listener, serve), daemon=True)
    thread.start()
    keep.callback(thread.join)
    # A thread that waits in `accept` is woken by this and not by a close.
    keep.callback(listener.shutdown, socket.SHUT_RDWR)
    return int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True)
class _Target:
    address: str
    port: int
    word: str


@dataclass(frozen=True, slots=True)
class _Fault:
    reason: str


def _say_at(address: str, word: bytes, keep: ExitStack) -> int:
    """Sends the word to whoever connects, until the end; returns the port."""

    def say(connection: socket.socket) -> None:
        # Whoever is gone was not reached, which is for itself to say.
        with connection, suppress(OSError):
            connection.sendall(word)

    return serve_at(address, say, keep)


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Takes connections until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:
            return
        serve(connection)


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
