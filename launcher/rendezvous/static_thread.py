"""A host's part in a gathering, on a thread of its own, as something to be selected on. See [Note: gathering]."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from dataclasses import dataclass

from dsrun.errors import LaunchError

from ..os_errors import refusal_of
from ..plan.launch_plan import LaunchPlan
from .bind import bind_own
from .static_node0 import await_hosts
from .static_nodes import FIRST_NOTE_S, NOTE_S, TRY_S, Presence, join_hosts


@dataclass(frozen=True, slots=True)
class WaitingNote:
    """A line about whom is waited for."""

    text: str


@dataclass(frozen=True, slots=True)
class AllHostsPresent:
    """All hosts are there; on node 0, with the socket they came to."""

    listener: socket.socket | None


GatheringNews = WaitingNote | AllHostsPresent | LaunchError


class StaticRendezvous:
    """A host's part in a gathering, on a thread of its own. See [Note: gathering].

    Args:
        plan: launch plan of a job with hosts outside, which each have a dsrun of their own.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        assert plan.outside is not None, "a plan with hosts outside"
        self._address, self._outside = plan.master_addr, plan.outside
        self._me = Presence.of(plan)
        self._news: queue.SimpleQueue[GatheringNews] = queue.SimpleQueue()
        self._wake_fd, self._woken_fd = os.pipe2(os.O_CLOEXEC)
        threading.Thread(target=self._run, daemon=True).start()

    def fileno(self) -> int:
        """What a selector waits on for news; never closed, as the thread may outlive whoever waits."""
        return self._wake_fd

    def next(self) -> GatheringNews:
        """Returns the next news, once there is some; `AllHostsPresent` or an error is the last."""
        os.read(self._wake_fd, 1)
        return self._news.get()

    def _run(self) -> None:
        try:
            self._tell(AllHostsPresent(self._gather()))
        except LaunchError as error:
            self._tell(error)
        except OSError as error:
            self._tell(LaunchError(f"cannot find together with the other hosts: {refusal_of(error)}"))

    def _gather(self) -> socket.socket | None:
        until_s = time.monotonic() + self._outside.patience_s
        if self._me.node_rank > 0:
            join_hosts(self._address, self._outside.port, self._me, until_s=until_s, tell=self._wait)
            return None
        listener = self._bind(until_s)
        try:
            await_hosts(listener, self._me, until_s=until_s, tell=self._wait)
        except LaunchError:
            listener.close()
            raise
        return listener

    def _bind(self, until_s: float) -> socket.socket:
        note_at_s = time.monotonic() + FIRST_NOTE_S
        while True:
            try:
                return bind_own(self._address, self._outside.port)
            except socket.gaierror as error:
                # A pod may be up before its name is.
                reason = f"cannot resolve {self._address!r}, where the other nodes come: {error.strerror}"
                now_s = time.monotonic()
                if now_s >= until_s:
                    raise LaunchError(reason) from error
                if now_s >= note_at_s:
                    note_at_s = now_s + NOTE_S
                    self._wait(reason)
                time.sleep(TRY_S)

    def _wait(self, text: str) -> None:
        self._tell(WaitingNote(text))

    def _tell(self, news: GatheringNews) -> None:
        self._news.put(news)
        os.write(self._woken_fd, b"x")
