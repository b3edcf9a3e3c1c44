"""One host as the front end sees it: the channel to its agent, read on threads of its own. Decides nothing.

Every event is put into the session's queue, in order for each host. A host may have only so many events in the
queue: above that its channel is not read, and the host is slowed down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from .failures import TAIL_LINES, describe_status
from .lines import LineAssembler
from .plan import LaunchPlan, NodePlan
from .protocol import Exit, FrameReader, Hello, Message, ProtocolError, Start, encode
from .transport.base import Channel

_QUEUED_EVENTS = 64
#: For an agent to end once its last word was heard, or it was killed.
_END_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Received:
    """The host's agent sent a message."""

    link: Link
    message: Message


@dataclass(frozen=True, slots=True)
class Said:
    """Something on the host wrote a line to the agent's stderr."""

    link: Link
    line: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The channel came to its end; `fault` says what was wrong with it, if anything."""

    link: Link
    fault: str | None


LinkEvent = Received | Said | Ended


class Link:
    """The channel to one host's agent.

    Args:
        node: the host's part of the plan.
        channel: to the agent, just started.
        put: takes events, from any thread; each but `Ended` must be answered by `handled`.
    """

    def __init__(self, node: NodePlan, channel: Channel, put: Callable[[LinkEvent], None]) -> None:
        self.node = node
        #: Nothing more is expected of this host.
        self.over = False
        #: When the host must have done what is expected of it next, monotonic; None while it may take any time.
        self.deadline_s: float | None = None
        self._channel = channel
        self._put = put
        self._room = threading.Semaphore(_QUEUED_EVENTS)
        self._stderr_tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._started_at_s = time.time()
        self._clock_offset_s = 0.0
        self._threads: list[threading.Thread] = []

    def begin(self, plan: LaunchPlan) -> None:
        """Sends the plan and reads from now on."""
        start = encode(Start(plan=plan.to_json(), node_rank=self.node.node_rank))
        for work in (lambda: self._read_messages(start), self._read_stderr):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: Message) -> None:
        """Sends a message; if the agent is gone, `Ended` says so."""
        with suppress(OSError, ValueError):
            self._channel.send(encode(message))

    def handled(self) -> None:
        """Makes room for one more event of this host."""
        self._room.release()

    def greet(self, hello: Hello) -> None:
        """Learns the difference of the clocks: the agent's time was read between our start and this moment."""
        middle_s = (self._started_at_s + time.time()) / 2
        offset_s = middle_s - hello.time_s
        # Within half of the round trip nothing is known, and on one machine the true difference is 0.
        self._clock_offset_s = offset_s if abs(offset_s) > time.time() - middle_s else 0.0

    def on_our_clock(self, message: Exit) -> Exit:
        """Returns the message with its times moved to the front end's clock."""
        error = message.error
        if error is not None:
            error = replace(error, time_s=self.our_time_s(error.time_s))
        return replace(message, time_s=self.our_time_s(message.time_s), error=error)

    def our_time_s(self, time_s: float) -> float:
        """Moves a time of the host's clock to the front end's."""
        return time_s + self._clock_offset_s

    def why_lost(self, fault: str | None) -> tuple[str, tuple[str, ...]]:
        """Returns why the channel ended too early, in words, and the last lines of the agent's stderr."""
        if fault is not None:
            # What cannot be understood cannot be waited for either; its host ends the ranks by itself.
            self._channel.kill()
        status = self._channel.wait(_END_PATIENCE_S)
        for thread in self._threads[1:]:
            thread.join(1.0)
        if fault is not None:
            return fault, tuple(self._stderr_tail)
        how = "closed its channel" if status is None else describe_status(status)
        return f"the agent {how} unexpectedly", tuple(self._stderr_tail)

    def kill(self) -> None:
        """Kills the agent, which does not do what is expected; its host ends the ranks by itself."""
        self._channel.kill()

    def close(self, *, wait: bool) -> None:
        """Ends the agent's lifeline.

        Args:
            wait: for the agent's end; if it does not come, the agent is killed.
        """
        with suppress(OSError):
            self._channel.end_input()
        if not wait:
            return
        if self._channel.wait(_END_PATIENCE_S) is None:
            self._channel.kill()
            self._channel.wait(_END_PATIENCE_S)
        for thread in self._threads:
            # Readers end with the channel, unless they wait for room that nobody will make any more.
            self._room.release(_QUEUED_EVENTS)
            thread.join(1.0)

    def _read_messages(self, start: bytes) -> None:
        """Runs on a thread, for it may wait: for an agent that does not read, or has nothing to say."""
        fault: str | None = None
        reader = FrameReader()
        with suppress(OSError):
            # It fails if the agent ended at once. What it said about that, and its status, are read next.
            self._channel.send(start)
        try:
            while data := self._channel.read_stdout():
                for message in reader.feed(data):
                    self._room.acquire()
                    self._put(Received(self, message))
        except (OSError, ProtocolError) as error:
            fault = str(error)
        self._put(Ended(self, fault))

    def _read_stderr(self) -> None:
        lines = LineAssembler()
        with suppress(OSError):
            while data := self._channel.read_stderr():
                self._say(lines.feed(data, now_s=time.monotonic()))
        self._say(lines.finish())

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self._stderr_tail.append(line)
            self._room.acquire()
            self._put(Said(self, line))
