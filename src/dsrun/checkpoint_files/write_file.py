"""One rank's file of a checkpoint: bytes to the disk, with checksums on the way.

Either from pieces in any memory, or from one image in memory that is aligned: past the page cache, by two threads.

[Note: locked until the verdict] A file stays open and locked until it is known whether an index names it. Who cleans a
tag up may remove files that no index names and nobody has locked: they are of a save that was killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

from .calls import DIRECT_BYTES, FileCalls, try_lock
from .index import BLOCK_BYTES, StoredFile

#: Bytes that are made durable at a time where the page cache is used: a slow disk then shows progress, where one flush
#: of everything would not.
SYNC_BYTES = 64 << 20
_WRITERS = 2


@dataclass(slots=True)
class WrittenFile:
    """A file that is on disk, and belongs to nobody yet; see [Note: locked until the verdict].

    Attributes:
        path: the file.
        stored: its size and checksums.
    """

    path: Path
    stored: StoredFile
    _calls: FileCalls
    _descriptor: int

    def release(self, *, remove: bool) -> None:
        """Lets go of the file.

        Args:
            remove: no index names it.
        """
        try:
            if remove:
                self._calls.remove(self.path)
        finally:
            os.close(self._descriptor)


def write_pieces(
    path: Path, pieces: Iterable[memoryview], *, calls: FileCalls, progress: Callable[[], None]
) -> WrittenFile:
    """Writes the bytes of `pieces`, one after the other, to a new file, and makes it durable.

    Args:
        path: the file; it must not exist.
        pieces: flat bytes.
        calls: the file system.
        progress: called after each piece, and for each block of a large one.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    sums = _Sums()
    position = unsynced = 0
    descriptor = calls.create(path)
    try:
        try_lock(descriptor)
        for piece in pieces:
            for start in range(0, len(piece), BLOCK_BYTES):
                part = piece[start : start + BLOCK_BYTES]
                calls.write(descriptor, part, position)
                sums.add(part)
                position += len(part)
                unsynced += len(part)
                if unsynced >= SYNC_BYTES:
                    calls.sync(descriptor)
                    unsynced = 0
                progress()
        calls.sync(descriptor)
        calls.sync_folder(path.parent)
    except BaseException:
        os.close(descriptor)
        calls.remove(path)
        raise
    return WrittenFile(path, StoredFile(position, sums.end()), calls, descriptor)


def write_image(
    path: Path, image: memoryview, nbytes: int, *, calls: FileCalls, progress: Callable[[], None]
) -> WrittenFile:
    """Writes the first `nbytes` of `image` to a new file, and makes it durable.

    Args:
        path: the file; it must not exist.
        image: page-aligned memory, readable to the next multiple of `DIRECT_BYTES`.
        nbytes: of the file.
        calls: the file system.
        progress: called after each block; what it raises ends the writing.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    descriptor, direct = _create(path, calls)

    def write_block(first: int) -> str:
        last = min(first + BLOCK_BYTES, nbytes)
        end = -(-last // DIRECT_BYTES) * DIRECT_BYTES if direct else last
        calls.write(descriptor, image[first:end], first)
        return xxh3_64_hexdigest(image[first:last])

    sums: list[str] = []
    try:
        try_lock(descriptor)
        with ThreadPoolExecutor(_WRITERS) as pool:
            # A window of blocks, so that an error ends the writing soon and progress is what is really written.
            firsts = range(0, nbytes, BLOCK_BYTES)
            under_way = [pool.submit(write_block, first) for first in firsts[:_WRITERS]]
            for number in range(len(firsts)):
                sums.append(under_way[number].result())
                if number + _WRITERS < len(firsts):
                    under_way.append(pool.submit(write_block, firsts[number + _WRITERS]))
                if not direct and (number + 1) * BLOCK_BYTES % SYNC_BYTES == 0:
                    calls.sync(descriptor)
                progress()
        if direct:
            calls.cut(descriptor, nbytes)
        calls.sync(descriptor)
        calls.sync_folder(path.parent)
    except BaseException:
        os.close(descriptor)
        calls.remove(path)
        raise
    return WrittenFile(path, StoredFile(nbytes, tuple(sums)), calls, descriptor)


def _create(path: Path, calls: FileCalls) -> tuple[int, bool]:
    """Makes the file, past the page cache where the file system can."""
    try:
        return calls.create(path, direct=True), True
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        calls.remove(path)  # some file systems make it before they refuse
        return calls.create(path), False


class _Sums:
    """Checksums of the blocks of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block = xxh3_64()
        self._room = BLOCK_BYTES

    def add(self, data: memoryview) -> None:
        while data:
            part = data[: self._room]
            self._block.update(part)
            self._room -= len(part)
            data = data[len(part) :]
            if self._room == 0:
                self._next()

    def end(self) -> tuple[str, ...]:
        if self._room < BLOCK_BYTES:
            self._next()
        return tuple(self._done)

    def _next(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block = xxh3_64()
        self._room = BLOCK_BYTES
