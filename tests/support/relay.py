"""A slow line: a relay of TCP connections that hands every byte on after a fixed time, both ways, at most at a rate.

It stands between a front end and a port of a host, in this process. It holds what is on its way, as a long line does,
so that the sender is held up only by the rate and by what a real socket would hold.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

_READ_BYTES = 1 << 16
#: On its way at most, in one direction; a sender that is faster than this each delay is held up.
_HELD_BYTES = 8 << 20


class Relay:
    """One port here that leads to one address.

    Args:
        target: address and port that connections are carried to.
        address: address of this machine to listen on.
        delay_s: seconds that every byte is on its way, in each direction.
        bytes_per_s: each way; None for no limit.
    """

    def __init__(
        self, target: tuple[str, int], *, address: str = "127.0.0.1", delay_s: float, bytes_per_s: float | None = None
    ) -> None:
        self._target = target
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server((address, 0))
        self.address: str = address
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        #: Bytes that were handed on, to the target and back.
        self.carried = [0, 0]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def close(self) -> None:
        """Cuts every connection, and ends."""
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a relay ends with its connections"
        for one in sockets:
            one.close()

    def _run(self, work: Callable[..., None], *words: object) -> None:
        thread = threading.Thread(target=work, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
            for index, (source, sink) in enumerate(((client, server), (server, client))):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line = _Line(self._delay_s, self._bytes_per_s)
                self._run(line.fill, source)
                self._run(self._drain, line, sink, index)

    def _drain(self, line: _Line, sink: socket.socket, index: int) -> None:
        try:
            while data := line.take():
                sink.sendall(data)
                with self._lock:
                    self.carried[index] += len(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            line.break_off()


class _Line:
    """What is on its way in one direction."""

    def __init__(self, delay_s: float, bytes_per_s: float | None) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        #: When each piece arrives, and what it is; an empty one is the end.
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._free_at_s = 0.0
        self._broken = False

    def fill(self, source: socket.socket) -> None:
        """Reads the source to its end."""
        while True:
            try:
                data = source.recv(_READ_BYTES)
            except OSError:
                data = b""
            with self._changed:
                self._changed.wait_for(lambda: self._held < _HELD_BYTES or self._broken)
                if self._broken:
                    return
                leaves_s = max(time.monotonic(), self._free_at_s)
                if self._bytes_per_s is not None:
                    leaves_s += len(data) / self._bytes_per_s
                self._free_at_s = leaves_s
                self._pieces.append((leaves_s + self._delay_s, data))
                self._held += len(data)
                self._changed.notify_all()
            if not data:
                return

    def take(self) -> bytes:
        """Waits for the next piece to arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            arrives_s, data = self._pieces[0]
            while (left_s := arrives_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._pieces.popleft()
            self._held -= len(data)
            self._changed.notify_all()
            return data

    def break_off(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


@contextmanager
def relay(
    target: tuple[str, int], *, address: str = "127.0.0.1", delay_s: float, bytes_per_s: float | None = None
) -> Generator[Relay]:
    """Makes a relay for as long as the block runs; see `Relay`."""
    made = Relay(target, address=address, delay_s=delay_s, bytes_per_s=bytes_per_s)
    try:
        yield made
    finally:
        made.close()
