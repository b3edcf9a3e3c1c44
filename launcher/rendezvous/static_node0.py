"""Node 0's part in a gathering: it waits for all others, turns strangers away, lets all go. See [Note: gathering]."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from dsrun.errors import LaunchError

from .bind import place_of
from .static_nodes import MOST_BYTES, WORD_PATIENCE_S, Notes, Presence, answer, read_presence, watch_over

#: After a connection that could not be accepted.
_BREATH_S = 0.1
#: Connections beyond the nodes that are held at once.
_SPARE = 64
#: Addresses of strangers that are told; a scanner has many.
_MOST_TOLD = 16


def await_hosts(listener: socket.socket, me: Presence, *, until_s: float, tell: Callable[[str], None]) -> None:
    """Node 0: waits for all others, and lets them go.

    Args:
        listener: socket that listens for the other hosts; it is blocking again afterwards.
        me: node 0.
        until_s: monotonic.
        tell: callback that gets a line about hosts that are waited for, now and then, and one about each stranger that
            is refused.

    Raises:
        LaunchError: some have not come in time.
    """
    node0 = _Node0(listener, me, tell)
    try:
        node0.await_all(until_s, tell)
    finally:
        node0.close()


class _Node0:
    """Connections to node 0, and who has come."""

    def __init__(self, listener: socket.socket, me: Presence, tell: Callable[[str], None]) -> None:
        self._listener = listener
        self._me = me
        self._tell = tell
        #: Hosts of strangers that were told.
        self._told: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._present: dict[int, tuple[socket.socket, str]] = {}
        #: Connections that have not said who they are: what they said so far, and until when they may.
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def await_all(self, until_s: float, tell: Callable[[str], None]) -> None:
        """See `await_hosts`."""
        notes = Notes(tell)
        while missing := self._missing():
            now_s = time.monotonic()
            if now_s >= until_s:
                reason = f"{_named(missing)} of {self._me.node_count} did not come in time"
                self._answer_all(reason)
                raise LaunchError(reason, hint=f"they are to come to {_listens_at(self._listener)}; do they run?")
            notes.say(f"waiting for {_named(missing)} of {self._me.node_count} at {_listens_at(self._listener)}")
            self._send_off_late(now_s)
            for key, _ in self._selector.select(min(1.0, until_s - now_s)):
                if key.fileobj is self._listener:
                    self._accept(now_s)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
        self._answer_all(None)

    def close(self) -> None:
        """Ends all connections; the listener stays."""
        for connection in [*self._strangers, *(connection for connection, _ in self._present.values())]:
            connection.close()
        self._selector.close()
        # The store's server takes it over as it was made.
        self._listener.setblocking(True)

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._me.node_count) if number not in self._present]

    def _accept(self, now_s: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # It is gone already, or this host has no descriptors left for a moment; that must not become a busy loop.
            time.sleep(_BREATH_S)
            return
        if len(self._strangers) >= self._me.node_count + _SPARE:
            connection.close()
            return
        watch_over(connection)
        connection.setblocking(False)
        self._strangers[connection] = (b"", now_s + WORD_PATIENCE_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _send_off_late(self, now_s: float) -> None:
        for connection, (_, patience_until_s) in list(self._strangers.items()):
            if now_s >= patience_until_s:
                self._tell_stranger(connection, "it did not say who it is")
                self._send_off(connection)

    def _send_off(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)
        for number, (present, _) in list(self._present.items()):
            if present is connection:
                del self._present[number]
        self._selector.unregister(connection)
        connection.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or connection not in self._strangers:
            # It left, or it has said who it is and has nothing more to say.
            self._send_off(connection)
            return
        said, patience_until_s = self._strangers[connection]
        said += data
        if b"\n" not in said and len(said) <= MOST_BYTES:
            self._strangers[connection] = (said, patience_until_s)
            return
        self._take(connection, said.partition(b"\n")[0])

    def _take(self, connection: socket.socket, line: bytes) -> None:
        came = read_presence(line)
        refusal = "this is a host of dsrun's, and that was no word of it" if came is None else self._refusal_of(came)
        if came is None or refusal is not None:
            self._tell_stranger(connection, "it is none of dsrun's" if came is None else refusal or "")
            answer(connection, refusal)
            self._send_off(connection)
            return
        if came.node_rank in self._present:
            # A twin, or the same one again, whose machine came back before its old connection was seen to end.
            there = self._present[came.node_rank][1]
            answer(connection, f"node {came.node_rank} is there already: {there}", try_again=True)
            self._send_off(connection)
            return
        del self._strangers[connection]
        self._present[came.node_rank] = (connection, came.name)

    def _tell_stranger(self, connection: socket.socket, reason: str) -> None:
        """Says once of each host that it was turned away."""
        try:
            host, port = connection.getpeername()[:2]
        except OSError:
            # It has gone, and with it its address.
            return
        if host not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(host)
            self._tell(f"a connection from {place_of(host, port)} to the rendezvous port was refused: {reason}")

    def _refusal_of(self, came: Presence) -> str | None:
        me = self._me
        if came.job != me.job:
            return "another job's nodes gather there"
        if (came.node_count, came.slots) != (me.node_count, me.slots):
            return (
                f"node 0 counts {me.node_count} nodes with {me.slots} ranks each, "
                f"this one {came.node_count} with {came.slots}"
            )
        if not 0 < came.node_rank < me.node_count:
            return f"there is no node {came.node_rank} of {me.node_count}"
        return None

    def _answer_all(self, refusal: str | None) -> None:
        for connection, _ in self._present.values():
            answer(connection, refusal)


def _listens_at(listener: socket.socket) -> str:
    return place_of(*listener.getsockname()[:2])


def _named(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"node {shown}" if len(numbers) == 1 else f"nodes {shown}"
