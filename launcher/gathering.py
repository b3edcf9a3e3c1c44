"""How hosts find together that each have a dsrun of their own, before their ranks start. Starts nothing, and blocks.

[Note: gathering] All were given one address and port. Host 0 binds them, and the others come there with who they are: a
word that only this job knows, their number, and how many ranks they have. Host 0 lets all go at once when all are
there, and the same socket then serves the rendezvous store; until somebody serves it, connections wait in its backlog.
So no rank waits for a host that is late, the missing ones are known by number, and whoever belongs to another job, or
counts differently, is told so. Nothing but these lines is read from a connection, and only so much.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from dsrun.contract import JOB_ID_ENV, NONCE_ENV, digest_of
from dsrun.errors import LaunchError

from .own_address import place_of
from .plan import LaunchPlan

#: A longer line is none of ours.
_MOST_BYTES = 4096
#: For a connection to say who it is.
_WORD_PATIENCE_S = 10.0
#: For one try to connect.
_CONNECT_PATIENCE_S = 5.0
#: Between two tries.
TRY_S = 0.5
#: From the beginning to the first note of whom is waited for, and from each to the next.
FIRST_NOTE_S, NOTE_S = 2.0, 30.0
#: After a connection that could not be accepted.
_BREATH_S = 0.1
#: Connections beyond the hosts that are held at once.
_SPARE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Who a host is.

    Attributes:
        job: stands for the job's nonce.
        node_rank: its number.
        node_count: how many hosts it knows of.
        slots: its ranks.
        name: what it calls itself.
    """

    job: str
    node_rank: int
    node_count: int
    slots: int
    name: str

    @classmethod
    def of(cls, plan: LaunchPlan) -> Presence:
        """Returns who the host of a plan with hosts outside is."""
        assert plan.outside is not None, "a plan with hosts outside"
        return cls(
            job=digest_of([plan.nonce]),
            node_rank=plan.outside.node_rank,
            node_count=plan.outside.node_count,
            slots=len(plan.ranks),
            name=socket.gethostname(),
        )


def shared_nonce(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Returns the word of a job whose hosts each have a dsrun of their own: it must be the same on all of them.

    `DSRUN_NONCE`, where whoever started the hosts has set it for all. Else a word derived from what all were given; it
    tells jobs apart that differ in address, port, size or words, and so keeps out strays that come by accident. That
    is no secret: who knows what is run, and reaches the port, could join.

    Args:
        plan: with hosts outside.
        environ: of this dsrun. One that runs inside a rank has inherited that job's nonce, which is not this job's.
    """
    assert plan.outside is not None, "a plan with hosts outside"
    given = environ.get(NONCE_ENV)
    if given and JOB_ID_ENV not in environ:
        return given
    words = [plan.master_addr, plan.outside.port, plan.outside.node_count, plan.world_size, *plan.program.args]
    return digest_of(["derived", plan.program.target, *map(str, words)])


def await_hosts(listener: socket.socket, me: Presence, *, until_s: float, tell: Callable[[str], None]) -> None:
    """Node 0: waits for all others, and lets them go.

    Args:
        listener: where they come; blocking again afterwards.
        me: node 0.
        until_s: monotonic.
        tell: takes a line about whom is waited for, now and then.

    Raises:
        LaunchError: some have not come in time.
    """
    node0 = _Node0(listener, me)
    try:
        node0.await_all(until_s, tell)
    finally:
        node0.close()


class _Node0:
    """Connections to node 0, and who has come."""

    def __init__(self, listener: socket.socket, me: Presence) -> None:
        self._listener = listener
        self._me = me
        self._selector = selectors.DefaultSelector()
        self._present: dict[int, tuple[socket.socket, str]] = {}
        #: Connections that have not said who they are: what they said so far, and until when they may.
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def await_all(self, until_s: float, tell: Callable[[str], None]) -> None:
        notes = _Notes(tell)
        while missing := self._missing():
            now_s = time.monotonic()
            if now_s >= until_s:
                why = f"{_named(missing)} of {self._me.node_count} did not come in time"
                self._answer_all(why)
                raise LaunchError(why, hint=f"they are to come to {_listens_at(self._listener)}; do they run?")
            notes.say(f"waiting for {_named(missing)} of {self._me.node_count} at {_listens_at(self._listener)}")
            self._send_off_late(now_s)
            for key, _ in self._selector.select(min(1.0, until_s - now_s)):
                if key.fileobj is self._listener:
                    self._accept(now_s)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
        self._answer_all(None)

    def close(self) -> None:
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
        _watch_over(connection)
        connection.setblocking(False)
        self._strangers[connection] = (b"", now_s + _WORD_PATIENCE_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _send_off_late(self, now_s: float) -> None:
        for connection, (_, patience_until_s) in list(self._strangers.items()):
            if now_s >= patience_until_s:
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
            data = connection.recv(_MOST_BYTES)
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
        if b"\n" not in said and len(said) <= _MOST_BYTES:
            self._strangers[connection] = (said, patience_until_s)
            return
        self._take(connection, said.partition(b"\n")[0])

    def _take(self, connection: socket.socket, line: bytes) -> None:
        came = _read_presence(line)
        refusal = "this is a host of dsrun's, and that was no word of it" if came is None else self._refusal_of(came)
        if came is None or refusal is not None:
            _answer(connection, refusal)
            self._send_off(connection)
            return
        if came.node_rank in self._present:
            # A twin, or the same one again, whose machine came back before its old connection was seen to end.
            there = self._present[came.node_rank][1]
            _answer(connection, f"node {came.node_rank} is there already: {there}", try_again=True)
            self._send_off(connection)
            return
        del self._strangers[connection]
        self._present[came.node_rank] = (connection, came.name)

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
            _answer(connection, refusal)


def join_hosts(address: str, port: int, me: Presence, *, until_s: float, tell: Callable[[str], None]) -> None:
    """Any other node: comes to node 0, and waits until all are there.

    Args:
        address: of node 0.
        port: its port.
        me: this host.
        until_s: monotonic.
        tell: takes a line about what is waited for, now and then.

    Raises:
        LaunchError: node 0 was not there in time, or lets this host not in.
    """
    place = place_of(address, port)
    notes = _Notes(tell)
    while True:
        why = _come(address, port, me, until_s, notes)
        if why is None:
            return
        if time.monotonic() >= until_s:
            reason = f"node 0 did not let all go in time at {place}: {why}"
            raise LaunchError(reason, hint="does it run, and do all others?")
        notes.say(f"waiting for node 0 at {place}: {why}")
        time.sleep(TRY_S)


class _Notes:
    """Lets a line pass now and then."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._at_s = time.monotonic() + FIRST_NOTE_S

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._at_s:
            self._at_s = now_s + NOTE_S
            self._tell(text)


def _come(address: str, port: int, me: Presence, until_s: float, notes: _Notes) -> str | None:
    """Comes to node 0 once; returns why it is to be tried again, None once all are there."""
    try:
        connection = socket.create_connection((address, port), _CONNECT_PATIENCE_S)
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
    with connection:
        _watch_over(connection)
        connection.settimeout(1.0)
        answer = b""
        try:
            connection.sendall(json.dumps(asdict(me)).encode() + b"\n")
            while b"\n" not in answer and len(answer) <= _MOST_BYTES:
                # Node 0 gives up by itself, and says so, a little later.
                if time.monotonic() >= until_s + _WORD_PATIENCE_S:
                    return "it waits for others"
                try:
                    data = connection.recv(_MOST_BYTES)
                except TimeoutError:
                    notes.say(f"node 0 at {place_of(address, port)} waits for other nodes")
                    continue
                if not data:
                    return "lost it again before all were there"
                answer += data
        except OSError as error:
            return f"lost it again: {(error.strerror or str(error)).lower()}"
    return _read_answer(answer.partition(b"\n")[0])


def _watch_over(connection: socket.socket) -> None:
    """Has a connection end within half a minute if the other machine vanishes without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _read_answer(line: bytes) -> str | None:
    """Reads the word of node 0; returns why to try again, None if all are there.

    Raises:
        LaunchError: it is a lasting no, or no word of it.
    """
    try:
        answer: Any = json.loads(line)
        refusal, try_again = answer["refusal"], answer["try_again"]
    except (ValueError, KeyError, TypeError):
        refusal, try_again = "what listens there is no dsrun", False
    if refusal is None or try_again:
        return refusal
    raise LaunchError(f"node 0 does not let this one in: {refusal}")


def _answer(connection: socket.socket, refusal: str | None, *, try_again: bool = False) -> None:
    with suppress(OSError):
        # Who does not read has gone, and finds that out itself.
        connection.send(json.dumps({"refusal": refusal, "try_again": try_again}).encode() + b"\n")


def _read_presence(line: bytes) -> Presence | None:
    try:
        came = Presence(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    expected = {"job": str, "node_rank": int, "node_count": int, "slots": int, "name": str}
    return came if all(type(getattr(came, name)) is kind for name, kind in expected.items()) else None


def _listens_at(listener: socket.socket) -> str:
    return place_of(*listener.getsockname()[:2])


def _named(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"node {shown}" if len(numbers) == 1 else f"nodes {shown}"
