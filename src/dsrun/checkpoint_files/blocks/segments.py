"""The bytes of a file that is put together: parts of memory, and parts of files that lie on a drive already.

Every byte goes through memory once, a block at a time, for its checksum has to be taken; what is read past the page
cache there (O_DIRECT) goes through aligned memory of its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..index.value import BLOCK_BYTES
from ..storage.calls import DIRECT_BYTES


@dataclass(frozen=True, slots=True)
class FileSegment:
    """Bytes of the file.

    Attributes:
        at: byte of where they come from.
        nbytes: number of bytes in the segment.
        source: descriptor of the file they come from; None: memory.
    """

    at: int
    nbytes: int
    source: int | None


def blocks_of(
    image: memoryview, segments: Sequence[FileSegment], *, ring: Sequence[memoryview]
) -> Iterator[tuple[memoryview, int]]:
    """Yields the blocks of a file, all of `BLOCK_BYTES` but the last, of which so many bytes count.

    Args:
        image: the memory.
        segments: segments of the file, in the order of the file.
        ring: blocks that are filled in turn.

    Raises:
        OSError: a file cannot be read, or ends too early.
    """
    reader = _Reader()
    number = filled = 0
    for segment in segments:
        done = 0
        while done < segment.nbytes:
            count = min(segment.nbytes - done, BLOCK_BYTES - filled)
            into = ring[number % len(ring)][filled : filled + count]
            if segment.source is None:
                into[:] = image[segment.at + done : segment.at + done + count]
            else:
                reader.read(segment.source, segment.at + done, into)
            done, filled = done + count, filled + count
            if filled == BLOCK_BYTES:
                yield ring[number % len(ring)], BLOCK_BYTES
                number, filled = number + 1, 0
    if filled:
        yield ring[number % len(ring)], filled


class _Reader:
    """Reads from files, direct or not, at any byte."""

    def __init__(self) -> None:
        self._aligned: memoryview | None = None

    def read(self, source: int, at: int, into: memoryview) -> None:
        if not fcntl.fcntl(source, fcntl.F_GETFL) & os.O_DIRECT:
            _fill(source, into, at, len(into))
            return
        if self._aligned is None:
            self._aligned = memoryview(mmap.mmap(-1, BLOCK_BYTES + 2 * DIRECT_BYTES))
        skip = at % DIRECT_BYTES
        whole = -(-(skip + len(into)) // DIRECT_BYTES) * DIRECT_BYTES
        _fill(source, self._aligned[:whole], at - skip, skip + len(into))
        into[:] = self._aligned[skip : skip + len(into)]


class _Unreadable(OSError):
    """A file that state is offloaded to cannot be read; it has a name no more, but one that it had."""

    def __init__(self, source: int, reason: str, at: int, number: int | None) -> None:
        super().__init__(number, reason, os.readlink(f"/proc/self/fd/{source}"))
        self._at = at

    def __str__(self) -> str:
        return (
            f"{self.filename}: the file that state is offloaded to cannot be read at byte {self._at}: {self.strerror}"
        )


def _fill(source: int, into: memoryview, at: int, wanted: int) -> None:
    """Reads at least `wanted` bytes."""
    done = 0
    while done < wanted:
        try:
            count = os.preadv(source, [into[done:]], at + done)
        except OSError as error:
            raise _Unreadable(source, error.strerror or str(error), at + done, error.errno) from error
        if not count:
            raise _Unreadable(source, "it ends there", at + done, errno.EIO)
        done += count
