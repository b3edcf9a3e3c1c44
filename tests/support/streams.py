"""What a program under test shows, line by line as it comes, on a pipe or on a terminal. Judges nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_READ_BYTES = 1 << 18
#: Longest wait for the end of a stream whose writer has ended.
_END_S = 10.0


class Lines:
    """The lines of one stream, read as they come by a thread of its own."""

    def __init__(self, read: Callable[[], bytes], *, keep: int | None = None) -> None:
        """Starts to read.

        Args:
            read: function that returns the next bytes; empty bytes at the end.
            keep: characters of each line that are kept, for floods.
        """
        self._read = read
        self._keep = keep
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        half = bytearray()
        while data := self._read():
            half += data
            if b"\n" in data or b"\r" in data:
                *whole, half[:] = re.split(rb"[\r\n]+", half)
                self._add(whole)
        self._add([bytes(half)] if half else [], ended=True)

    def _add(self, lines: Sequence[bytes], *, ended: bool = False) -> None:
        with self._changed:
            for line in lines:
                self._lines.append(_ESCAPES.sub(b"", line[: self._keep]).decode("utf-8", "surrogateescape"))
            self._ended = ended
            self._changed.notify_all()

    def now(self) -> list[str]:
        """The lines so far."""
        with self._changed:
            return list(self._lines)

    def to_end(self) -> list[str]:
        """Waits for the end of the stream and returns all its lines."""
        self._thread.join(_END_S)
        assert not self._thread.is_alive(), "dsrun has ended, but someone holds its output open"
        return self.now()

    def matches(self, pattern: re.Pattern[str], *, timeout_s: float) -> Iterator[re.Match[str]]:
        """Yields where `pattern` is found in old and new lines, until the stream ends or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda at=at: len(self._lines) > at or self._ended, deadline_s - time.monotonic()
                )
                fresh, ended = self._lines[at:], self._ended
            at += len(fresh)
            yield from filter(None, map(pattern.search, fresh))
            if ended or time.monotonic() >= deadline_s:
                return


class Terminal:
    """A terminal with someone in front of it, who can press keys and close the window.

    Args:
        has_shell: something else has it open too, as the shell that a program was started from; else it ends with
            the last program in it.
    """

    def __init__(self, *, has_shell: bool = False) -> None:
        self._ours, self.theirs = pty.openpty()
        self._has_shell = has_shell
        self._wake, self._woken = os.pipe()
        self.lines = Lines(self._read)

    def enter(self) -> None:
        """Makes it the controlling terminal of the calling process, which leads a session of its own."""
        fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0)

    def started(self) -> None:
        """Leaves the terminal to the program that was started in it."""
        if not self._has_shell:
            os.close(self.theirs)

    def press(self, keys: bytes) -> None:
        """Types."""
        os.write(self._ours, keys)

    def close(self) -> None:
        """Closes the window: the kernel hangs up on whoever runs in it. May be called twice."""
        if self._woken >= 0:
            os.close(self._woken)
            self._woken = -1
        # The reader closes it: with a read under way elsewhere it would stay open.
        self.lines.to_end()
        if self._has_shell:
            os.close(self.theirs)
            self._has_shell = False

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._ours, self._wake], [], [])
        try:
            data = b"" if self._wake in ready else os.read(self._ours, _READ_BYTES)
        except OSError:
            # EIO: nobody has the other end open any more.
            data = b""
        if not data:
            os.close(self._ours)
            os.close(self._wake)
        return data


def lines_of(descriptor: int, *, keep: int | None = None) -> Lines:
    """Reads a pipe to its end, and closes it.

    Args:
        descriptor: the end to read from; taken over.
        keep: number of characters of each line that are kept, for floods of output; None for all. See `Lines`.
    """

    def read() -> bytes:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            os.close(descriptor)
        return data

    return Lines(read, keep=keep)
