"""How hosts find together that each have a dsrun of their own, before their ranks start. Starts nothing, and blocks.

[Note: gathering] All were given one address and port. Node 0 binds them, and the others come there with who they are: a
word that only this job knows, their number, and how many ranks they have. Node 0 lets all go at once when all are
there, and the same socket then serves the rendezvous store; until somebody serves it, connections wait in its backlog.
So no rank waits for a host that is late, the missing ones are known by number, and whoever belongs to another job, or
counts differently, is told so. Nothing but these lines is read from a connection, and only so much.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from dsrun.contract.environment import JOB_ID_ENV, NONCE_ENV, digest_of
from dsrun.errors import LaunchError

from ..plan.launch_plan import LaunchPlan
from .bind import place_of

#: A longer line is none of ours.
MOST_BYTES = 4096
#: For a connection to say who it is.
WORD_PATIENCE_S = 10.0
#: For one try to connect.
_CONNECT_PATIENCE_S = 5.0
#: Between two tries.
TRY_S = 0.5
#: From the beginning to the first note of whom is waited for, and from each to the next.
FIRST_NOTE_S, NOTE_S = 2.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Who a host is.

    Attributes:
        job: stands for the job's nonce.
        node_rank: its number.
        node_count: number of hosts in the job, as this host was told it.
        slots: its ranks.
        name: host name, as the host itself gives it.
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
        plan: launch plan of a job with hosts outside, which each have a dsrun of their own.
        environ: environment variables of this dsrun. One that runs inside a rank has inherited that job's nonce, which
            is not this job's.
    """
    assert plan.outside is not None, "a plan with hosts outside"
    given = environ.get(NONCE_ENV)
    if given and JOB_ID_ENV not in environ:
        return given
    words = [plan.master_addr, plan.outside.port, plan.outside.node_count, plan.world_size, *plan.program.args]
    return digest_of(["derived", plan.program.target, *map(str, words)])


def join_hosts(address: str, port: int, me: Presence, *, until_s: float, tell: Callable[[str], None]) -> None:
    """Any other node: comes to node 0, and waits until all are there.

    Args:
        address: address of node 0.
        port: its port.
        me: identity of this host, which is sent to node 0.
        until_s: monotonic.
        tell: callback that gets a line about what is waited for, now and then.

    Raises:
        LaunchError: node 0 was not there in time, or lets this host not in.
    """
    place = place_of(address, port)
    notes = Notes(tell)
    while True:
        reason = _come(address, port, me, until_s, notes)
        if reason is None:
            return
        if time.monotonic() >= until_s:
            message = f"node 0 did not let all go in time at {place}: {reason}"
            raise LaunchError(message, hint="does it run, and do all others?")
        notes.say(f"waiting for node 0 at {place}: {reason}")
        time.sleep(TRY_S)


class Notes:
    """Lets a line pass now and then."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._at_s = time.monotonic() + FIRST_NOTE_S

    def say(self, text: str) -> None:
        """Tells it, unless something was told a short while ago."""
        now_s = time.monotonic()
        if now_s >= self._at_s:
            self._at_s = now_s + NOTE_S
            self._tell(text)


def _come(address: str, port: int, me: Presence, until_s: float, notes: Notes) -> str | None:
    """Comes to node 0 once; returns why it is to be tried again, None once all are there."""
    try:
        connection = socket.create_connection((address, port), _CONNECT_PATIENCE_S)
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
    with connection:
        watch_over(connection)
        connection.settimeout(1.0)
        said = b""
        try:
            connection.sendall(json.dumps(asdict(me)).encode() + b"\n")
            while b"\n" not in said and len(said) <= MOST_BYTES:
                # Node 0 gives up by itself, and says so, a little later.
                if time.monotonic() >= until_s + WORD_PATIENCE_S:
                    return "it waits for others"
                try:
                    data = connection.recv(MOST_BYTES)
                except TimeoutError:
                    notes.say(f"node 0 at {place_of(address, port)} waits for other nodes")
                    continue
                if not data:
                    return "lost it again before all were there"
                said += data
        except OSError as error:
            return f"lost it again: {(error.strerror or str(error)).lower()}"
    return _read_answer(said.partition(b"\n")[0])


def watch_over(connection: socket.socket) -> None:
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
        said: Any = json.loads(line)
        refusal, try_again = said["refusal"], said["try_again"]
    except (ValueError, KeyError, TypeError):
        refusal, try_again = "what listens there is no dsrun", False
    if refusal is None or try_again:
        return refusal
    raise LaunchError(f"node 0 does not let this one in: {refusal}")


def answer(connection: socket.socket, refusal: str | None, *, try_again: bool = False) -> None:
    """Sends node 0's word.

    Args:
        connection: connection of another node, or of a stranger.
        refusal: reason why the other side is not let in, or not let go; None lets it go.
        try_again: whether the other side may come again.
    """
    with suppress(OSError):
        # Who does not read has gone, and finds that out itself.
        connection.send(json.dumps({"refusal": refusal, "try_again": try_again}).encode() + b"\n")


def read_presence(line: bytes) -> Presence | None:
    """Reads what a node says of itself; None where that makes no sense."""
    try:
        came = Presence(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    expected = {"job": str, "node_rank": int, "node_count": int, "slots": int, "name": str}
    return came if all(type(getattr(came, name)) is kind for name, kind in expected.items()) else None
