"""The agent's end of what ranks tell of their stdin: a pipe that all may open. See [Note: reading] in rank_stdin.

Knows no rank's output; decides nothing.

[Note: order of readings] The console needs them in their place among the bytes that the rank wrote, and these come by
other pipes. A rank that begins to read has written everything before: its pipes are emptied first. One that ends a wait
wrote nothing since it began: that is sent before output which is read after it. So both are looked for whenever output
is in hand, and the order of the words themselves is kept whatever happens.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import get_args

from ...protocol import Reading, ReadingState

_READ_BYTES = 1 << 16
_STATES: dict[str, ReadingState] = {state: state for state in get_args(ReadingState)}
_BEGINNINGS: frozenset[ReadingState] = frozenset({"waits", "waits_for_pipe", "has_none"})


class ReadingPipe:
    """Made before the ranks, and kept to the end of the agent."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""
        self._told: deque[Reading] = deque()

    @property
    def path(self) -> str:
        """Where ranks of the same user find it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._write_fd}"

    def fileno(self) -> int:
        """What a selector waits on."""
        return self._read_fd

    def read(self) -> None:
        """Takes what ranks have told; what is no word of `rank_stdin` is passed over."""
        try:
            *lines, self._rest = (self._rest + os.read(self._read_fd, _READ_BYTES)).split(b"\n")
        except BlockingIOError:
            return
        for line in lines:
            rank, _, word = line.decode("utf-8", "replace").partition(" ")
            state = _STATES.get(word)
            if rank.isdecimal() and state is not None:
                self._told.append(Reading(rank=int(rank), state=state))

    def take(self, *, beginning: bool) -> Iterator[Reading]:
        """Takes out, in order, what was told.

        Args:
            beginning: all of it; else up to the first that says that a rank begins to read.
        """
        while self._told and (beginning or self._told[0].state not in _BEGINNINGS):
            yield self._told.popleft()
