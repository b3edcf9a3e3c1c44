"""Bytes of a checkpoint's files, read by blocks and checked before anybody sees them; the next ones are on their way.

Source of the checksum: xxh3 of https://github.com/Cyan4973/xxHash. It finds what a disk or a copy damages, no forger.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from dsrun.errors import CheckpointError

from .calls import DIRECT_BYTES, leave_direct
from .index import BLOCK_BYTES, Index, StoredFile
from .reference import told_of_others

#: Blocks that are read at the same time, each into a buffer of `BLOCK_BYTES`.
_READERS = 2
#: Boxes of a damaged block that a message names.
_NAMED = 5
_HINT = "load another tag, or copy the file again from where it is whole"


@dataclass(frozen=True, slots=True)
class Block:
    """A checked block: `data` are the bytes of the file from `first` on, until the next block is asked for."""

    first: int
    data: memoryview


class BlockReader:
    """Reads blocks of the files of one tag.

    Args:
        folder: the tag's.
        index: its index, for sizes, checksums, and what lies where.
        shared: other processes of this host read the same blocks, so they are to come through the page cache. Without
            it they go past it where that works, which was measured 2 to 6 times as fast for what is not in it.
    """

    def __init__(self, folder: Path, index: Index, *, shared: bool = False) -> None:
        self._folder = folder
        self._index = index
        self._shared = shared
        self._buffers: list[memoryview] = []

    def blocks(self, name: str, numbers: Sequence[int]) -> Generator[Block]:
        """Yields some blocks of a file in the order asked for; reads ahead in threads.

        Args:
            name: the file, as the index lists it.
            numbers: of the blocks; block n begins at byte n * `BLOCK_BYTES`.

        Raises:
            CheckpointError: the file is missing, cut off, of another size or damaged; names file, block and tensors.
        """
        path, known = self._folder / name, self._index.files[name]
        buffers = self._buffers_for(known, min(len(numbers), _READERS + 1))
        with _opened(path, known, direct=not self._shared) as descriptor, ThreadPoolExecutor(_READERS) as pool:
            free = list(buffers)
            under_way: deque[Future[Block]] = deque()
            try:
                for number in numbers:
                    if not free:
                        block = under_way.popleft().result()
                        yield block
                        free.append(_whole_buffer(block, buffers))
                    under_way.append(pool.submit(self._read, descriptor, name, number, free.pop()))
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    def check(self, name: str) -> Generator[str]:
        """Yields what is wrong with a file, reading all of it; goes on after a damaged block."""
        path, known = self._folder / name, self._index.files[name]
        (buffer,) = self._buffers_for(known, 1)
        try:
            with _opened(path, known, direct=not self._shared) as descriptor:
                for number in range(-(-known.nbytes // BLOCK_BYTES)):
                    try:
                        self._read(descriptor, name, number, buffer)
                    except CheckpointError as error:
                        yield str(error)
        except CheckpointError as error:
            yield str(error)

    def _buffers_for(self, file: StoredFile, count: int) -> list[memoryview]:
        """Returns memory for blocks of a file: no more of it than they have."""
        nbytes = min(BLOCK_BYTES, max(1, -(-file.nbytes // DIRECT_BYTES)) * DIRECT_BYTES)
        self._buffers = [buffer for buffer in self._buffers if len(buffer) >= nbytes]
        self._buffers += [memoryview(mmap.mmap(-1, nbytes)) for _ in range(count - len(self._buffers))]
        return self._buffers[:count]

    def _read(self, descriptor: int, name: str, number: int, buffer: memoryview) -> Block:
        first, known = number * BLOCK_BYTES, self._index.files[name]
        data = buffer[: min(BLOCK_BYTES, known.nbytes - first)]
        done = 0
        while done < len(data):
            try:
                count = os.preadv(descriptor, [buffer[done:]], first + done)
            except OSError as error:
                if error.errno == errno.EINVAL and leave_direct(descriptor):
                    continue
                raise CheckpointError(f"{self._folder / name}: cannot be read: {error}", hint=_HINT) from error
            if count == 0:
                raise CheckpointError(f"{self._folder / name}: it ends at byte {first + done}", hint=_HINT)
            done += count
        if known.sums is not None and xxh3_64_hexdigest(data) != known.sums[number]:
            raise CheckpointError(
                f"{self._folder / name}: bytes {first} to {first + len(data)} are damaged, of "
                f"{self._inside(name, first, first + len(data))}{told_of_others(self._folder / name, known)}",
                hint=_HINT,
            )
        return Block(first, data)

    def _inside(self, name: str, first: int, last: int) -> str:
        """Names the tensors that have bytes there; the file's header has a name too."""
        named = [
            f"{role} of `{tensor}`"
            for (tensor, role), stored in self._index.tensors.items()
            if any(box.file == name and box.first < last and first < box.last for box in stored.boxes)
        ]
        if first == 0:
            named.insert(0, "the header")
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return ", ".join(named[:_NAMED]) + more


@contextmanager
def _opened(path: Path, known: StoredFile, *, direct: bool) -> Generator[int]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.open(path, flags)
    except OSError as error:
        others = told_of_others(path, known)
        raise CheckpointError(f"{path}: cannot be read: {error}{others}", hint=_HINT) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != known.nbytes:
            raise CheckpointError(
                f"{path}: cannot be read: it has {size} bytes, and had {known.nbytes} when it was saved"
                f"{told_of_others(path, known)}",
                hint=_HINT,
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _whole_buffer(block: Block, buffers: Sequence[memoryview]) -> memoryview:
    """Returns the buffer that a block lies in."""
    return next(buffer for buffer in buffers if buffer.obj is block.data.obj)
