"""Tells every agent, several times within its lease, that the front end lives.

On a thread of its own: the session's may wait for a reader of the output that does not read (a pager), and a job
must not end of that. Does not judge whether agents live; the session does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from ..protocol import Lease, Message

#: Leases sent within one lease's time, so that a few may be late.
BEATS_PER_LEASE = 5


class Listener(Protocol):
    """An agent that waits for leases."""

    @property
    def over(self) -> bool:
        """Whether it waits no more."""
        ...

    @property
    def is_started(self) -> bool:
        """Whether it waits already."""
        ...

    def send(self, message: Message) -> None:
        """Sends it a message."""
        ...


class Keepalive:
    """Sends leases until it is stopped.

    Args:
        listeners: the agents; those that wait no more are passed over.
        lease_s: their patience.
    """

    def __init__(self, listeners: Sequence[Listener], *, lease_s: float) -> None:
        self._listeners = listeners
        self._period_s = lease_s / BEATS_PER_LEASE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; does not wait for a send that an agent holds up."""
        self._stopped.set()
        if self._thread.ident is not None:
            # It may never have come to life, where the machine allows no more threads.
            self._thread.join(1.0)

    def _beat(self) -> None:
        while not self._stopped.wait(self._period_s):
            for listener in self._listeners:
                if listener.is_started and not listener.over:
                    listener.send(Lease())
