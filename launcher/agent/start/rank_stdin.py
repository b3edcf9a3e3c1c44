"""A rank's end of its stdin: reads as python does, and tells the launcher when it waits for somebody. Stands in a rank.

The launcher must know three things that no output shows. That a rank waits for a person: the line it has begun is a
prompt and is to be seen now, and no hang. That the person has typed a line: the terminal's cursor is in the next one.
And that a rank reads which was given no stdin: it finds the end of file, and somebody should hear why.

[Note: reading] One pipe for all ranks of a host, which the agent reads, takes lines of a rank and a `ReadingState`. It
is opened by its name in /proc at the first read that has to wait, as the table of heartbeats is: a rank that never
reads has nothing of it, and no child inherits it. Reads below Python (`os.read(0)`, a program that the script starts)
are not told.
"""

from __future__ import annotations

import io
import os
import select
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from dsrun.contract.environment import READING_ENV, STDIN_RANK_ENV

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from ...protocol import ReadingState

_T = TypeVar("_T")


def take_stdin() -> None:
    """Puts a stream on descriptor 0 into `sys.stdin` that tells of its reads."""
    rank = os.environ.get("RANK", "0")
    raw = RankStdin(rank, news=os.environ.get(READING_ENV), is_given=os.environ.get(STDIN_RANK_ENV) == rank)
    stream = io.TextIOWrapper(
        io.BufferedReader(cast(io.RawIOBase, raw)), encoding=sys.stdin.encoding, errors=sys.stdin.errors
    )
    stream.mode = "r"  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdin = sys.__stdin__ = stream  # pyright: ignore[reportAttributeAccessIssue]


class RankStdin(io.FileIO):
    """Descriptor 0, as the raw layer below `sys.stdin`.

    Args:
        rank: number of this rank, as text.
        news: path of the agent's pipe; None where nobody listens.
        is_given: dsrun's own stdin is on the descriptor.
    """

    def __init__(self, rank: str, *, news: str | None, is_given: bool) -> None:
        super().__init__(0, closefd=False)
        #: What python calls it.
        self.name = "<stdin>"
        self._rank = rank
        self._news = news
        self._is_given = is_given
        self._has_told = False
        self._pid = os.getpid()
        self._pipe: int | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Reads as `FileIO` does."""
        return self._around(lambda: super(RankStdin, self).readinto(buffer))

    def read(self, size: int | None = -1, /) -> bytes | None:
        """Reads as `FileIO` does."""
        return self.readall() if size is None or size < 0 else self._around(lambda: super(RankStdin, self).read(size))

    def readall(self) -> bytes:
        """Reads as `FileIO` does."""
        parts: list[bytes] = []
        while part := self.read(io.DEFAULT_BUFFER_SIZE):
            parts.append(part)
        return b"".join(parts)

    def _around(self, read: Callable[[], _T]) -> _T:
        if not self._is_given:
            if not self._has_told:
                self._has_told = True
                self._tell("has_none")
            return read()
        if not _has_to_wait():
            return read()
        is_terminal = os.isatty(0)
        self._tell("waits" if is_terminal else "waits_for_pipe")
        after: ReadingState = "goes_on"
        try:
            data = read()
            if data and is_terminal and _shows_what_is_typed():
                after = "typed"
            return data
        finally:
            self._tell(after)

    def _tell(self, state: ReadingState) -> None:
        # A child that was forked reads as it likes: the launcher knows ranks alone.
        if self._news is None or os.getpid() != self._pid:
            return
        try:
            if self._pipe is None:
                self._pipe = os.open(self._news, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._pipe, f"{self._rank} {state}\n".encode())
        except OSError as error:
            # Another PID namespace, or an agent that is gone: the rank reads on as it would without a launcher.
            self._news = None
            if state == "has_none":
                print(f"dsrun: rank {self._rank} reads stdin, which is empty ({error.strerror})", file=sys.stderr)


def _has_to_wait() -> bool:
    """Whether nothing can be read at this moment, not even the end of the file."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return not poll.poll(0)


def _shows_what_is_typed() -> bool:
    try:
        return bool(termios.tcgetattr(0)[3] & termios.ECHO)
    except termios.error:
        # The terminal was closed.
        return False
