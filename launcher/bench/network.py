"""How long the way from this host to another is, and how wide: answers for pairs of hosts; see [Note: questions].

One host listens at all its addresses, the other takes the fastest that it reaches (reachability) and drives. Plain TCP
with a few streams, as Gloo uses it: a floor for what RDMA gives. Chooses no pairs.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from dsrun.errors import LaunchError

from ..rendezvous import reachability
from ..rendezvous.host_addresses import taken_mbit_of
from .figure import LEAST_REPETITIONS, figure

#: One does not fill a fast link from one interpreter.
STREAMS = 4
_PINGS = 200
_REPETITION_S = 0.3
_BLOCK_BYTES = 1 << 20
#: For a connection, and for the other end's next word.
_PATIENCE_S = 10.0
#: What a connection is for: its first byte after the key.
_ECHO, _SINK = b"e", b"s"


def listen(arguments: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Answers `bench_listen`: waits for other hosts at every address that one may reach, until the survey is over.

    Args:
        arguments: `word`, by which the others know this host, and `key`, without which nobody is served; ASCII.
        keep: stack that stops the listening when it ends, with the survey.

    Returns:
        `offers`: a list of objects with `address`, `port` (which says the word), `rate_port`, and `taken_mbit`, what
        the link's speed is taken for.
    """
    key = str(arguments["key"]).encode()
    known = reachability.listen({"word": arguments["word"], "interfaces": None}, keep)["offers"]
    return {
        "offers": [
            {
                "address": offer["address"],
                "port": offer["port"],
                "taken_mbit": taken_mbit_of(offer),
                "rate_port": reachability.serve_at(offer["address"], lambda stream: _serve_aside(stream, key), keep),
            }
            for offer in known
        ]
    }


def measure(arguments: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Answers `bench_reach`: measures the way to a host that listens, over the fastest link that leads there.

    Args:
        arguments: `offers` of that host, `word`, `key`, and `repetition_s`, the length of one repetition.
        keep: stack of things to keep until the survey is over; not used here.

    Returns:
        `address`, the one that was taken, and `figures` of the round trip and of the rate.

    Raises:
        LaunchError: none of its addresses is reached, or the connection breaks.
    """
    offers: list[dict[str, Any]] = arguments["offers"]
    asked = {"word": arguments["word"], "patience_s": reachability.REACH_PATIENCE_S, "targets": offers}
    reached = [offer for offer, way in zip(offers, reachability.reach(asked, keep), strict=True) if "fault" not in way]
    if not reached:
        tried = ", ".join(offer["address"] for offer in offers) or "it has none"
        raise LaunchError(f"none of its addresses is reached from here: {tried}", hint="does a firewall drop it?")
    best = max(reached, key=lambda offer: offer["taken_mbit"])
    place, repetition_s = (best["address"], best["rate_port"]), float(arguments["repetition_s"])
    key = str(arguments["key"]).encode()
    try:
        with _connect(place, key + _ECHO) as connection:
            trips = [_round_trip(connection) for _ in range(LEAST_REPETITIONS)]
        with ExitStack() as stack:
            streams = [stack.enter_context(_connect(place, key + _SINK)) for _ in range(STREAMS)]
            rates = [_send(streams, repetition_s) for _ in range(LEAST_REPETITIONS)]
    except OSError as error:
        raise LaunchError(f"{place[0]}: {error.strerror or error}".lower()) from error
    figures = figure("round trip", "s", trips), figure(f"TCP rate, {STREAMS} streams", "B/s", rates)
    return {"address": best["address"], "figures": [one.to_json() for one in figures]}


def _connect(place: tuple[str, int], greeting: bytes) -> socket.socket:
    connection = socket.create_connection(place, timeout=_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(greeting)
    return connection


def _round_trip(connection: socket.socket) -> float:
    """Returns the mean of many, in seconds: one alone is at the mercy of the scheduler."""
    begun_s = time.perf_counter()
    for _ in range(_PINGS):
        connection.sendall(b".")
        if not connection.recv(1):
            raise ConnectionResetError("the other host has ended the connection")
    return (time.perf_counter() - begun_s) / _PINGS


def _send(streams: Sequence[socket.socket], repetition_s: float) -> float:
    """Returns bytes a second over all streams, as the other end has received them."""
    block = bytes(_BLOCK_BYTES)
    begun_s = time.perf_counter()

    def pour(stream: socket.socket) -> None:
        blocks = 0
        # At least one block. The first byte of a block says whether another follows.
        while True:
            last = time.perf_counter() - begun_s >= repetition_s
            stream.sendall(b"l" if last else b"m")
            stream.sendall(block)
            blocks += 1
            if last:
                break
        # The other end answers once it has all of it: what lies in buffers on the way has not arrived.
        if not stream.recv(1):
            raise ConnectionResetError("the other host has ended the connection")
        counts.append(blocks)

    counts: list[int] = []
    _each_in_a_thread(pour, streams)
    return sum(counts) * _BLOCK_BYTES / (time.perf_counter() - begun_s)


def _each_in_a_thread(work: Callable[[socket.socket], None], streams: Sequence[socket.socket]) -> None:
    faults: list[OSError] = []

    def run(stream: socket.socket) -> None:
        try:
            work(stream)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(stream,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _serve_aside(connection: socket.socket, key: bytes) -> None:
    """Serves a connection on a thread of its own."""
    threading.Thread(target=_serve, args=(connection, key), daemon=True).start()


def _serve(connection: socket.socket, key: bytes) -> None:
    """Does what the connection is for; the other end tells of whatever goes wrong."""
    with connection:
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            greeting = _read(connection, len(key) + 1)
            if not hmac.compare_digest(greeting[:-1], key):
                return
            while greeting[-1:] == _ECHO and (data := connection.recv(1)):
                connection.sendall(data)
            buffer = memoryview(bytearray(_BLOCK_BYTES))
            while greeting[-1:] == _SINK and (mark := connection.recv(1)):
                left = _BLOCK_BYTES
                while left:
                    count = connection.recv_into(buffer, left)
                    if count == 0:
                        return
                    left -= count
                if mark == b"l":
                    connection.sendall(b".")
        except OSError:
            return


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other end is gone")
        data += more
    return data
