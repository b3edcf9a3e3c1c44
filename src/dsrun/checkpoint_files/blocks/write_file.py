"""One rank's file of a checkpoint: bytes to where it is to lie, with checksums on the way.

From pieces in any memory, from one image of the file in aligned memory, or put together of parts of memory and files;
on a disk past the page cache, by two threads: measured 2 to 8 times as fast as through it, and a slow disk shows
progress block by block.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..index.value import BLOCK_BYTES
from ..storage.calls import FileCalls
from ..storage.places import Blocks, Content, Place, WrittenFile
from ..storage.posix import WRITERS
from ..storage.registry import storage_of
from .segments import FileSegment, blocks_of

#: Memory that is written from past the page cache begins at a multiple of it. Some old kernels want more, and say so.
DIRECT_MEMORY_BYTES = 512
#: One more than are taken before the first of them is written: the next one is filled meanwhile.
_RING_BLOCKS = WRITERS + 1


class Repeatable(Iterable[memoryview]):
    """Pieces that can be gone through again, so that a store can be tried again.

    Args:
        make: yields them from the beginning.
    """

    def __init__(self, make: Callable[[], Iterator[memoryview]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[memoryview]:
        return self._make()


def write_pieces(
    path: Place, pieces: Iterable[memoryview], *, calls: FileCalls, progress: Callable[[], None]
) -> WrittenFile:
    """Writes the bytes of `pieces`, one after the other, to a new file, and makes it durable.

    Args:
        path: the file; it must not exist.
        pieces: flat bytes, which are copied to a few aligned blocks, but for whole blocks that are aligned as they lie:
            these must stay as they are until this returns.
        calls: the file system, where it lies in one.
        progress: callback that runs after each block; an exception from it ends the writing.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
        StorageError: likewise, of a store.
    """
    ring = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_RING_BLOCKS)]

    def blocks() -> Blocks:
        number = filled = 0
        for piece in pieces:
            start = 0
            while start < len(piece):
                if not filled and len(piece) - start >= BLOCK_BYTES and _is_aligned(piece[start:]):
                    yield piece[start : start + BLOCK_BYTES], BLOCK_BYTES
                    start += BLOCK_BYTES
                    continue
                count = min(len(piece) - start, BLOCK_BYTES - filled)
                ring[number % len(ring)][filled : filled + count] = piece[start : start + count]
                start, filled = start + count, filled + count
                if filled == BLOCK_BYTES:
                    yield ring[number % len(ring)], BLOCK_BYTES
                    number, filled = number + 1, 0
        if filled:
            yield ring[number % len(ring)], filled

    content = Content(blocks, None, is_repeatable=iter(pieces) is not pieces)
    return storage_of(path, calls).write(path, content, over=None, progress=progress)


def _is_aligned(data: memoryview) -> bool:
    """Whether memory may be written from past the page cache."""
    return not data.readonly and ctypes.addressof(ctypes.c_char.from_buffer(data)) % DIRECT_MEMORY_BYTES == 0


def write_image(
    path: Place, image: memoryview, nbytes: int, *, calls: FileCalls, progress: Callable[[], None]
) -> WrittenFile:
    """Writes the first `nbytes` of `image` to a new file, and makes it durable.

    Args:
        path: the file; it must not exist.
        image: page-aligned memory, readable to the next multiple of `DIRECT_BYTES`.
        nbytes: size of the file in bytes.
        calls: the file system, where it lies in one.
        progress: callback that runs after each block; an exception from it ends the writing.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
        StorageError: likewise, of a store.
    """

    def blocks() -> Blocks:
        for first in range(0, nbytes, BLOCK_BYTES):
            yield image[first : first + BLOCK_BYTES], min(BLOCK_BYTES, nbytes - first)

    return storage_of(path, calls).write(path, Content(blocks, nbytes), over=None, progress=progress)


def write_segments(
    path: Place,
    image: memoryview,
    segments: Sequence[FileSegment],
    *,
    calls: FileCalls,
    progress: Callable[[], None],
) -> WrittenFile:
    """Writes a new file that is put together of parts of `image` and of other files, and makes it durable.

    Args:
        path: the file; it must not exist.
        image: memory.
        segments: segments that make up the file, in order.
        calls: the file system, where it lies in one.
        progress: callback that runs after each block, when nothing of the block is read any more; an exception from it
            ends the writing.

    Raises:
        OSError: the file cannot be written, or another one not be read; nothing is left of it.
        StorageError: likewise, of a store.
    """
    ring = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_RING_BLOCKS)]
    # Other files may change behind what was read of them.
    content = Content(
        lambda: blocks_of(image, segments, ring=ring), sum(part.nbytes for part in segments), is_repeatable=False
    )
    return storage_of(path, calls).write(path, content, over=None, progress=progress)
