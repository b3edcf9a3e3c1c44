"""One host as the front end sees it: the channel to its agent, opened and read on threads of its own. Decides nothing.

Every event is put into the session's queue, in order for each host. A host may have only so many events in the
queue: above that its channel is not read, and the host is slowed down. Nothing here waits for a host on the
session's thread, so that one that hangs holds up no other.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from dsrun.errors import LaunchError

from ..failures.report import TAIL_LINES, describe_status
from ..lifeline import Lifeline
from ..logs.lines import LineAssembler
from ..plan.launch_plan import LaunchPlan, NodePlan
from ..protocol import Exit, FrameReader, Hello, Message, ProtocolError, Start, encode
from ..transport.base import CONNECTION_LOST, Channel

#: For an agent to end once its last word was heard, or it was killed.
_END_PATIENCE_S = 5.0
#: Two threads a host read and wait, and call nothing deep; 1,024 hosts at the usual 8 MiB would reserve 16 GiB.
_STACK_BYTES = 1 << 20
#: The rendezvous store looks up a name for each rank's address, for its own log, and torch says so where there is none.
#: Nothing comes of it, and as the agent's last words it would hide what does.
_NAMELESS_CLIENT = "[c10d] The hostname of the client socket cannot be retrieved"
#: For a send to an agent that may not be reading.
_LOCK_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ChannelOpening:
    """The host's turn has come: its channel is being opened."""

    link: Link


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The host's agent sent a message."""

    link: Link
    message: Message


@dataclass(frozen=True, slots=True)
class Said:
    """Something on the host wrote a line to the agent's stderr."""

    link: Link
    line: str


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """The channel came to its end, or never opened.

    Attributes:
        link: link that came to its end.
        reason: reason why the channel ended, in words that explain a lost host.
        last_lines: last lines of the agent's stderr.
        hint: a way out, where one is known.
    """

    link: Link
    reason: str
    last_lines: tuple[str, ...] = ()
    hint: str | None = None


LinkEvent = ChannelOpening | MessageReceived | Said | ChannelEnd


def start_frame(plan: LaunchPlan, *, mark: str = "", config: str | None = None) -> Callable[[int], tuple[bytes, bytes]]:
    """Returns a function from a host's number to the frame of its `Start`, in two pieces.

    The first piece is the plan, which is encoded once for all hosts: it names every rank, so that encoding it for each
    host would cost hosts times ranks. Where a host's GPUs are is for itself alone, and would double the plan.

    Args:
        plan: the launch.
        mark: name of the file in the run folder by which a host sees that it shares it, as in `Start`; empty for none.
        config: text of the training config, as in `Start`; None where there is none.
    """
    bare = replace(plan, nodes=tuple(replace(node, gpus=()) for node in plan.nodes))
    whole = encode(Start(plan=bare.to_json(), node_rank=0, mark=mark, config=config))
    head, found, tail = whole.rpartition(b'"node_rank":0,"gpus":[]')
    assert found, "a start says which host it is for, after the plan"

    def frame(node_rank: int) -> tuple[bytes, bytes]:
        gpus = json.dumps([asdict(gpu) for gpu in plan.nodes[node_rank].gpus], separators=(",", ":"))
        return head, b'"node_rank":%d,"gpus":%s' % (node_rank, gpus.encode("ascii")) + tail

    return frame


class Link:
    """The channel to one host's agent.

    Args:
        node: the host's part of the plan.
        put: callback that gets events, on any thread; `MessageReceived` and `Said` must be answered by `handled`.
        room: events of this host that may wait to be handled.
        lease_s: longest silence of its agent.
    """

    def __init__(self, node: NodePlan, put: Callable[[LinkEvent], None], *, room: int, lease_s: float) -> None:
        self.node = node
        #: Nothing more is expected of this host.
        self.over = False
        #: When the host must have done what is expected of it next, monotonic; None while it may take any time.
        self.deadline_s: float | None = None
        self._put = put
        self._room_size = room
        self._room = threading.Semaphore(room)
        self._stderr_tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._clock_offset_s = 0.0
        self._knocked_at_s = 0.0
        self._lifeline = Lifeline(lease_s, time.monotonic())
        self._is_cut = False
        # Of all that follows: the channel is opened on one thread, and written to from several.
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._cancelled = False
        self._ready = False
        self._unsent: list[bytes] = []
        self._opened = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, connect: Callable[[], Channel], start: Sequence[bytes], gate: threading.Semaphore) -> None:
        """Opens the channel, sends the plan, and reads from now on; returns at once.

        Args:
            connect: function that starts the agent and returns the channel to it; it may take its time.
            start: the pieces of the first message.
            gate: semaphore for how many hosts may be on their way at once, from the first knock to the agent's first
                word.
        """
        before = threading.stack_size(_STACK_BYTES)
        try:
            for work in (self._read_stderr, lambda: self._live(connect, start, gate)):
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(before)

    def send(self, message: Message) -> None:
        """Sends a message, after the plan; if the agent is gone, `ChannelEnd` says so."""
        with self._lock:
            if self._channel is not None and self._ready:
                _send(self._channel, encode(message))
            else:
                self._unsent.append(encode(message))

    @property
    def is_started(self) -> bool:
        """Whether the agent has been sent the plan, so that ranks may run there."""
        return self._ready

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing came from the agent for the whole lease; to be asked every second or so."""
        return self._lifeline.has_run_out(now_s)

    @property
    def is_out_of_touch(self) -> bool:
        """Whether it was the host, and not its agent alone, that was lost: it may well not answer any more."""
        return self._is_cut or self._lifeline.has_run_out(time.monotonic())

    def handled(self) -> None:
        """Makes room for one more event of this host."""
        self._room.release()

    def greet(self, hello: Hello) -> None:
        """Learns the difference of the clocks: the agent's time was read between our knock and this moment."""
        middle_s = (self._knocked_at_s + time.time()) / 2
        offset_s = middle_s - hello.time_s
        # Within half of the round trip nothing is known, and on one machine the true difference is 0.
        self._clock_offset_s = offset_s if abs(offset_s) > time.time() - middle_s else 0.0

    @property
    def clock_offset_s(self) -> float:
        """Seconds to add to times of the host's clock; 0 where it is not known to be off."""
        return self._clock_offset_s

    def on_our_clock(self, message: Exit) -> Exit:
        """Returns the message with its times moved to the front end's clock."""
        error = message.error
        if error is not None:
            error = replace(error, time_s=self.our_time_s(error.time_s))
        return replace(message, time_s=self.our_time_s(message.time_s), error=error)

    def our_time_s(self, time_s: float) -> float:
        """Moves a time of the host's clock to the front end's."""
        return time_s + self._clock_offset_s

    def cancel(self) -> bool:
        """Gives up a host whose agent has not been sent the plan; returns whether it was so.

        Nothing runs there yet. A channel that opens after all is ended at once, by its own thread.
        """
        # Asked before the lock is taken, which a send may hold for as long as an agent does not read.
        if self._ready:
            return False
        with self._lock:
            if self._ready:
                return False
            self._cancelled = True
            if self._channel is not None:
                self._channel.kill()
            return True

    def kill(self) -> None:
        """Kills the agent, which does not do what is expected; its host ends the ranks by itself."""
        if not self.cancel():
            assert self._channel is not None, "a link that is ready has a channel"
            self._channel.kill()

    def end_input(self) -> None:
        """Ends the agent's lifeline."""
        # Closed under the lock, lest a lease is written to whatever has the descriptor's number by then.
        if self._ready and self._lock.acquire(timeout=_LOCK_PATIENCE_S):
            try:
                self._end_input()
            finally:
                self._lock.release()
        else:
            self.kill()

    def close(self, until_s: float) -> None:
        """Waits for the agent's end; if it does not come in time, the agent is killed.

        Args:
            until_s: monotonic.
        """
        channel = self._channel
        if channel is None:
            # Its thread waits for a host that does not answer, or for its turn, and holds nothing.
            return
        if channel.wait(max(0.0, until_s - time.monotonic())) is None:
            channel.kill()
            channel.wait(_END_PATIENCE_S)
        # Readers end with the channel, unless they wait for room that nobody will make any more.
        self._room.release(self._room_size)
        for thread in self._threads:
            thread.join(1.0)

    # --- on the link's own threads

    def _live(self, connect: Callable[[], Channel], start: Sequence[bytes], gate: threading.Semaphore) -> None:
        with gate:
            if self._cancelled:
                self._opened.set()
                return
            self._knocked_at_s = time.time()
            self._put(ChannelOpening(self))
            try:
                channel = connect()
            except LaunchError as error:
                reason = error.problems[0].message.removeprefix(f"host {self.node.host.name}: ")
                self._opened.set()
                self._put(ChannelEnd(self, reason, hint=error.hint))
                return
            if not self._adopt(channel):
                self._see_off(channel)
                return
            for piece in start:
                _send(channel, piece)
            self._get_ready(channel)
            reader = FrameReader()
            # Its first word, for which the next host waits; a host that never speaks is given up by the session.
            fault = self._read_once(channel, reader)
        while fault is None:
            fault = self._read_once(channel, reader)
        self._put(ChannelEnd(self, self._why_ended(channel, fault), tuple(self._stderr_tail)))

    def _adopt(self, channel: Channel) -> bool:
        with self._lock:
            self._channel = channel
            cancelled = self._cancelled
        self._opened.set()
        if cancelled:
            channel.kill()
            self._end_input()
        return not cancelled

    def _see_off(self, channel: Channel) -> None:
        """Reads a killed agent's channel to its end and waits for it, so that no pipe and no process is left of it."""
        with suppress(OSError):
            while channel.read_stdout():
                pass
        channel.wait(_END_PATIENCE_S)

    def _get_ready(self, channel: Channel) -> None:
        with self._lock:
            for data in self._unsent:
                _send(channel, data)
            self._ready = True

    def _read_once(self, channel: Channel, reader: FrameReader) -> str | None:
        """Waits for bytes and hands on their messages; returns what was wrong, empty at a plain end."""
        try:
            data = channel.read_stdout()
            if not data:
                return ""
            self._lifeline.renew()
            for message in reader.feed(data):
                self._room.acquire()
                self._put(MessageReceived(self, message))
        except (OSError, ProtocolError) as error:
            return str(error)
        return None

    def _why_ended(self, channel: Channel, fault: str) -> str:
        if self.over:
            return "it has finished"
        if fault:
            # What cannot be understood cannot be waited for either; its host ends the ranks by itself.
            channel.kill()
        status = channel.wait(_END_PATIENCE_S)
        reader_of_stderr = self._threads[0]
        reader_of_stderr.join(1.0)
        if status == CONNECTION_LOST and not fault:
            self._is_cut = True
            return "the connection to its agent was lost"
        how = "closed its channel" if status is None else describe_status(status)
        return fault or f"the agent {how} unexpectedly"

    def _end_input(self) -> None:
        assert self._channel is not None, "there is a channel to end"
        with suppress(OSError):
            self._channel.end_input()

    def _read_stderr(self) -> None:
        self._opened.wait()
        channel = self._channel
        if channel is None:
            # It could not be opened, or is not wanted any more.
            return
        lines = LineAssembler()
        with suppress(OSError):
            while data := channel.read_stderr():
                self._say(lines.feed(data, now_s=time.monotonic()))
        self._say(lines.finish())

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            if _NAMELESS_CLIENT in line:
                continue
            self._stderr_tail.append(line)
            self._room.acquire()
            self._put(Said(self, line))


def _send(channel: Channel, data: bytes) -> None:
    # It fails if the agent has ended. What it said about that, and its status, are read next.
    with suppress(OSError, ValueError):
        channel.send(data)
