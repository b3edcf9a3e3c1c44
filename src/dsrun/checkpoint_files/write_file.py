"""One rank's file of a checkpoint: bytes to the disk, with checksums on the way.

Either from pieces in any memory, or from one image of the file in aligned memory; past the page cache, by two threads:
measured 2 to 8 times as fast as through it, and a slow disk shows progress block by block.

[Note: locked until the verdict] A file stays open and locked until it is known whether an index names it. Who cleans a
tag up may remove files that no index names and nobody has locked: they are of a save that was killed.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from .calls import DIRECT_BYTES, FileCalls, try_lock
from .index import BLOCK_BYTES, StoredFile

#: Bytes that are made durable at a time where the page cache has to be used: one flush of everything shows no progress.
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
        pieces: flat bytes, which are copied to a few aligned blocks.
        calls: the file system.
        progress: called after each block; what it raises ends the writing.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    # One more than are being written: the next one is filled meanwhile.
    ring = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_WRITERS + 1)]

    def blocks() -> Iterator[tuple[memoryview, int]]:
        number = filled = 0
        for piece in pieces:
            start = 0
            while start < len(piece):
                count = min(len(piece) - start, BLOCK_BYTES - filled)
                ring[number % len(ring)][filled : filled + count] = piece[start : start + count]
                start, filled = start + count, filled + count
                if filled == BLOCK_BYTES:
                    yield ring[number % len(ring)], BLOCK_BYTES
                    number, filled = number + 1, 0
        if filled:
            yield ring[number % len(ring)], filled

    return _write(path, blocks(), calls=calls, progress=progress)


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
    firsts = range(0, nbytes, BLOCK_BYTES)
    blocks = ((image[first : first + BLOCK_BYTES], min(BLOCK_BYTES, nbytes - first)) for first in firsts)
    return _write(path, blocks, calls=calls, progress=progress)


def _write(
    path: Path, blocks: Iterator[tuple[memoryview, int]], *, calls: FileCalls, progress: Callable[[], None]
) -> WrittenFile:
    """Writes blocks, all of `BLOCK_BYTES` but the last, of which so many bytes count.

    Not more than `_WRITERS` are taken before the first of them is written: who yields them may use their memory again.
    """
    descriptor, direct = _create(path, calls)

    def write_block(data: memoryview, count: int, first: int) -> str:
        calls.write(descriptor, data[: -(-count // DIRECT_BYTES) * DIRECT_BYTES if direct else count], first)
        return xxh3_64_hexdigest(data[:count])

    sums: list[str] = []
    nbytes = 0
    try:
        try_lock(descriptor)
        with ThreadPoolExecutor(_WRITERS) as pool:
            under_way: deque[Future[str]] = deque()
            for data, count in blocks:
                under_way.append(pool.submit(write_block, data, count, nbytes))
                nbytes += count
                if len(under_way) == _WRITERS:
                    sums.append(under_way.popleft().result())
                    progress()
                if not direct and nbytes % SYNC_BYTES == 0:
                    calls.sync(descriptor)
            while under_way:
                sums.append(under_way.popleft().result())
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
    except FileExistsError:
        raise
    except OSError:
        calls.remove(path)  # some file systems make it before they refuse
        return calls.create(path), False
