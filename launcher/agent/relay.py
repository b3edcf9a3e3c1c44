"""Ranks' pipes -> output frames on the agent's stdout, in bounded memory. Does not interpret what ranks write.

[Note: pressure] Nothing here waits. If the front end reads slowly, frames are held up to a limit; above it ranks'
pipes are not read, they fill up, and the ranks wait in their writes. If the front end is gone, pipes are still read and
the bytes dropped, so that a rank which saves its state in the grace is not stuck in a print. Signs of life pass all
frames that wait, and only the newest is kept: a host whose output is held back has not gone silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..protocol import Message, Output, StreamName, encode

_READ_BYTES = 1 << 18
#: Pipe of a rank's stream: how far a rank can print on while the agent is busy.
_PIPE_BYTES = 1 << 20
#: Unsent bytes above which no more output is read, and below which it is read again.
_HIGH_WATER_BYTES = 8 << 20
_LOW_WATER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Stream:
    rank: int
    name: StreamName
    descriptor: int


class Relay:
    """Frames on their way to the front end, and the pipes that most of them come from. See [Note: pressure].

    Args:
        selector: shared with the agent; every key's data is a function to call when the key is ready.
        descriptor: file descriptor to which frames are written; it is made non-blocking.
    """

    def __init__(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        self._selector = selector
        self._descriptor = descriptor
        self._frames: deque[bytes] = deque()
        self._held_bytes = 0
        #: To be sent before all frames but one that is sent in part already.
        self._sign_of_life: bytes | None = None
        self._mid_frame = False
        self._writing = False
        self._paused = False
        self._streams: list[_Stream] = []
        self._sequence: dict[int, int] = {}
        #: Called with output in hand that is not sent yet, and again once it is: what ranks tell by another pipe is put
        #: in its place by it.
        self.before_output: Callable[[], None] = lambda: None
        self.after_output: Callable[[], None] = lambda: None
        #: The front end reads no more.
        self.broken = False
        #: When output last moved, or was held back; for whoever waits for the end of it (monotonic seconds).
        self.moved_at_s = time.monotonic()
        os.set_blocking(descriptor, False)

    @property
    def unsent(self) -> bool:
        """Frames wait for the front end to read."""
        return bool(self._frames)

    @property
    def is_full(self) -> bool:
        """So much waits for the front end to read that output is held back."""
        return self._paused

    @property
    def unread(self) -> bool:
        """A pipe has not come to its end."""
        return bool(self._streams)

    def open_stream(self, rank: int, name: StreamName) -> int:
        """Makes the pipe for a rank's stream and reads from it from now on.

        Returns:
            the write end, blocking; the caller closes it.
        """
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        # Refused above the user's limit of pipe memory; the default of 64 KiB works too.
        with contextlib.suppress(OSError):
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(read_fd, False)
        stream = _Stream(rank, name, read_fd)
        self._streams.append(stream)
        self._listen(stream)
        return write_fd

    def send(self, message: Message) -> None:
        """Queues a message and sends what the descriptor takes now."""
        if not self.broken:
            frame = encode(message)
            self._frames.append(frame)
            self._held_bytes += len(frame)
            self._flush()

    def send_sign_of_life(self, message: Message) -> None:
        """Sends a message as soon as possible, in place of the one before if that was not sent yet."""
        if not self.broken:
            self._sign_of_life = encode(message)
            self._flush()

    def abandon(self) -> None:
        """The front end is gone: frames are dropped from now on."""
        self.broken = True
        self._sign_of_life = None
        self._frames.clear()
        self._held_bytes = 0
        self._balance()

    def drain(self, rank: int) -> None:
        """Sends what a rank has written so far, so that what is told of the rank next comes after it."""
        for stream in [stream for stream in self._streams if stream.rank == rank]:
            # What a pipe holds, and no more: another thread of the rank may write for ever. A stream may end meanwhile;
            # one that is held back is not read here either.
            for _ in range(1 + _PIPE_BYTES // _READ_BYTES):
                if self._paused or stream not in self._streams or not self._read(stream):
                    break

    def close_streams(self) -> None:
        """Stops reading pipes that have not ended."""
        for stream in list(self._streams):
            self._close(stream)

    def _read(self, stream: _Stream) -> bool:
        """Sends what there is to read; returns whether that was anything."""
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self.moved_at_s = time.monotonic()
        if not data:
            self._close(stream)
            return False
        self.before_output()
        sequence = self._sequence.get(stream.rank, 0)
        self._sequence[stream.rank] = sequence + 1
        text = data.decode("utf-8", "surrogateescape")
        self.send(Output(rank=stream.rank, stream=stream.name, sequence=sequence, time_s=time.time(), text=text))
        self.after_output()
        return True

    def _flush(self) -> None:
        try:
            while self._frames or self._sign_of_life is not None:
                if self._sign_of_life is not None and not self._mid_frame:
                    self._write_sign_of_life(self._sign_of_life)
                else:
                    self._write_frame(self._frames[0])
        except BlockingIOError:
            pass  # Full: the selector says when to go on.
        except OSError:
            self.abandon()
        self._balance()

    def _write_frame(self, frame: bytes) -> None:
        sent = os.write(self._descriptor, frame)
        self._held_bytes -= sent
        self.moved_at_s = time.monotonic()
        self._mid_frame = sent < len(frame)
        if self._mid_frame:
            self._frames[0] = frame[sent:]
        else:
            self._frames.popleft()

    def _write_sign_of_life(self, frame: bytes) -> None:
        # Not noted in `moved_at_s`: it is no output, and comes for as long as output is waited for.
        sent = os.write(self._descriptor, frame)
        self._sign_of_life = None
        self._mid_frame = sent < len(frame)
        if self._mid_frame:
            self._frames.appendleft(frame[sent:])
            self._held_bytes += len(frame) - sent

    def _balance(self) -> None:
        """Listens for room while frames wait, and to the ranks only while they are not too many."""
        waiting = bool(self._frames) or self._sign_of_life is not None
        if self._writing != waiting:
            self._writing = not self._writing
            if self._writing:
                self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._flush)
            else:
                self._selector.unregister(self._descriptor)
        limit = _LOW_WATER_BYTES if self._paused else _HIGH_WATER_BYTES
        if self._paused != (self._held_bytes > limit):
            self._paused = not self._paused
            for stream in self._streams:
                if self._paused:
                    self._selector.unregister(stream.descriptor)
                else:
                    self._listen(stream)

    def _listen(self, stream: _Stream) -> None:
        callback: Callable[[], object] = partial(self._read, stream)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, callback)

    def _close(self, stream: _Stream) -> None:
        if not self._paused:
            self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)
        self._streams.remove(stream)
