"""Bytes of a checkpoint's files, read by blocks in threads, and checked: by whom wants them in order before they are
seen (`blocks`), or, where they go to memory that is nobody's before all are there, on their way (`pour`).

Source of the checksum: xxh3 of https://github.com/Cyan4973/xxHash. It finds what a disk or a copy damages, no forger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from dsrun.direct_io.buffers import huge_buffer
from dsrun.errors import CheckpointError
from dsrun.units import format_list

from ..index.value import BLOCK_BYTES, Index, StoredFile
from ..reference import told_of_others
from ..storage.calls import DIRECT_BYTES
from ..storage.places import OpenedFile, Place, ReadPattern
from ..storage.registry import storage_of
from .pieces import PIECE_BYTES, Sink, read_pieces
from .shared import ReceivedBlock, SentBlock, SharedBlocks

#: Blocks that are read at the same time, each into a buffer of `BLOCK_BYTES`.
_READERS = 2
#: Blocks that are read at the same time, each in pieces of `PIECE_BYTES`: the disk has more to do while one is hashed.
_POURERS = 4
#: Likewise, where every second one or fewer are read here, and the others come from other ranks.
_SHARERS = 8
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
            it they go past it where that works, for a third of the processor's time.
        sharing: shared blocks through which `pour` gives blocks to other processes and takes those that they have read;
            None for no sharing.
    """

    def __init__(
        self, folder: Place, index: Index, *, shared: bool = False, sharing: SharedBlocks | None = None
    ) -> None:
        self._folder = folder
        self._index = index
        self._shared = shared
        self._sharing = sharing
        self._buffers: list[memoryview] = []

    def blocks(self, name: str, numbers: Sequence[int]) -> Generator[Block]:
        """Yields some blocks of a file in the order asked for; reads ahead in threads.

        Args:
            name: the file, as the index lists it.
            numbers: numbers of the blocks to read; block n begins at byte n * `BLOCK_BYTES`.

        Raises:
            CheckpointError: the file is missing, cut off, of another size or damaged; names file, block and tensors.
        """
        path, known = self._folder / name, self._index.files[name]
        buffers = self._buffers_for(known, min(len(numbers), _READERS + 1))
        with _opened(path, known, direct=not self._shared) as file, ThreadPoolExecutor(_READERS) as pool:
            free = list(buffers)
            under_way: deque[Future[Block]] = deque()
            try:
                for number in numbers:
                    if not free:
                        block = under_way.popleft().result()
                        yield block
                        free.append(_whole_buffer(block, buffers))
                    under_way.append(pool.submit(self._read, file, name, number, free.pop()))
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    def pour(self, name: str, numbers: Sequence[int], sink: Sink, *, shared: bool | None = None) -> Generator[int]:
        """Reads some blocks of a file to a sink, and yields each one's number when it is there and checked.

        Args:
            name: the file, as the index lists it.
            numbers: numbers of the blocks to read.
            sink: receiver of the bytes; it gets them before they are checked.
            shared: whether other processes of this host read the same blocks of this file; None for the setting of the
                `BlockReader`.

        Raises:
            CheckpointError: see `blocks`.
        """
        for number, finish in self._poured(name, numbers, sink, shared=self._shared if shared is None else shared):
            finish()
            yield number

    def check(self, name: str) -> Generator[str]:
        """Yields what is wrong with a file, reading all of it; goes on after a damaged block."""
        numbers = range(-(-self._index.files[name].nbytes // BLOCK_BYTES))
        try:
            for _, finish in self._poured(name, numbers, _Nobody(), shared=self._shared):
                try:
                    finish()
                except CheckpointError as error:
                    yield str(error)
        except CheckpointError as error:
            yield str(error)

    def _poured(
        self, name: str, numbers: Sequence[int], sink: Sink, *, shared: bool
    ) -> Generator[tuple[int, Callable[[], None]]]:
        """Yields each block's number, and what returns when it was read and raises what is wrong with it."""
        path, known = self._folder / name, self._index.files[name]
        most = _POURERS if self._sharing is None else _SHARERS
        memory = memoryview(huge_buffer(max(1, min(most, len(numbers))) * PIECE_BYTES))
        spares = [memory[first : first + PIECE_BYTES] for first in range(0, len(memory), PIECE_BYTES)]

        def pour_one(number: int) -> None:
            spare = spares.pop()
            try:
                self._pour(file, name, number, sink, spare)
            finally:
                spares.append(spare)

        with _opened(path, known, direct=not shared) as file, ThreadPoolExecutor(most) as pool:
            if len(numbers) == 1:  # not worth a thread
                yield numbers[0], partial(pour_one, numbers[0])
                return
            results = [pool.submit(pour_one, number) for number in numbers]
            try:
                for number, result in zip(numbers, results, strict=True):
                    yield number, result.result
            finally:
                # From the last one on: a thread that is free meanwhile begins none behind one that is given up. What
                # it begins may wait for a peer, and that one for what is given up, see `SharedBlocks`.
                for result in reversed(results):
                    result.cancel()

    def _pour(self, file: OpenedFile, name: str, number: int, sink: Sink, spare: memoryview) -> None:
        first, known, sharing = number * BLOCK_BYTES, self._index.files[name], self._sharing
        nbytes = min(BLOCK_BYTES, known.nbytes - first)

        def from_disk(start: int, count: int) -> memoryview:
            if sharing is not None:
                sharing.beat()  # also where the block is nobody else's
            self._fill(file, name, spare[: -(-count // DIRECT_BYTES) * DIRECT_BYTES], start, count)
            return spare[:count]

        if sharing is not None and sharing.is_given(name, number):
            try:
                found = read_pieces(from_disk, first, nbytes, SentBlock(sink, sharing, name, number))
            except BaseException:
                sharing.end_giving(name, number)
                raise
        elif sharing is not None and sharing.is_taken(name, number):

            def from_another(start: int, count: int) -> memoryview:
                data = sharing.take(name, number, (start - first) // PIECE_BYTES)
                return from_disk(start, count) if data is None else data[:count]

            try:
                found = read_pieces(from_another, first, nbytes, ReceivedBlock(sink, sharing, name, number))
            finally:
                sharing.let_go(name, number)
            # A peer's word, by memory that some processors show in another order than it was written in: what is
            # called damaged was read from the disk by this rank.
            if known.sums is not None and found != known.sums[number]:
                found = read_pieces(from_disk, first, nbytes, sink)
        else:
            found = read_pieces(from_disk, first, nbytes, sink)
        self._compare(name, number, nbytes, found)

    def _buffers_for(self, file: StoredFile, count: int) -> list[memoryview]:
        """Returns memory for blocks of a file: no more of it than they have."""
        nbytes = min(BLOCK_BYTES, max(1, -(-file.nbytes // DIRECT_BYTES)) * DIRECT_BYTES)
        self._buffers = [buffer for buffer in self._buffers if len(buffer) >= nbytes]
        self._buffers += [memoryview(huge_buffer(nbytes)) for _ in range(count - len(self._buffers))]
        return self._buffers[:count]

    def _read(self, file: OpenedFile, name: str, number: int, buffer: memoryview) -> Block:
        first, known = number * BLOCK_BYTES, self._index.files[name]
        data = buffer[: min(BLOCK_BYTES, known.nbytes - first)]
        self._fill(file, name, buffer, first, len(data))
        self._compare(name, number, len(data), xxh3_64_hexdigest(data))
        return Block(first, data)

    def _fill(self, file: OpenedFile, name: str, buffer: memoryview, first: int, nbytes: int) -> None:
        """Reads `nbytes` of the file, from `first` on; more are read where they are there and there is room."""
        done = 0
        while done < nbytes:
            try:
                count = file.read_into(buffer[done:], first + done)
            except OSError as error:
                raise CheckpointError(f"{self._folder / name}: cannot be read: {error}", hint=_HINT) from error
            if count == 0:
                raise CheckpointError(f"{self._folder / name}: it ends at byte {first + done}", hint=_HINT)
            done += count

    def _compare(self, name: str, number: int, nbytes: int, found: str) -> None:
        """Raises where a block has another checksum than it was saved with."""
        first, known = number * BLOCK_BYTES, self._index.files[name]
        if known.sums is not None and found != known.sums[number]:
            raise CheckpointError(
                f"{self._folder / name}: bytes {first} to {first + nbytes} are damaged, of "
                f"{self._inside(name, first, first + nbytes)}{_told_of_others(self._folder / name, known)}",
                hint=_HINT,
            )

    def _inside(self, name: str, first: int, last: int) -> str:
        """Names the tensors that have bytes there; the file's header has a name too."""
        named = [
            f"{role} of `{tensor}`"
            for (tensor, role), stored in self._index.tensors.items()
            if any(box.file == name and box.first < last and first < box.last for box in stored.boxes)
        ]
        if first == 0:
            named.insert(0, "the header")
        return format_list(named, _NAMED)


def check_sizes(folder: Place, index: Index, names: Iterable[str]) -> None:
    """Raises where a file is not there or has another size than it was saved with; reads none of its bytes.

    Args:
        folder: the tag's.
        index: its index.
        names: names of the files to check, as the index lists them.

    Raises:
        CheckpointError: naming the first such file.
    """
    for name in names:
        with _opened(folder / name, index.files[name], direct=False):
            pass


class _Nobody:
    """A sink for bytes that are read to be checked."""

    def take(self, first: int, data: memoryview) -> None:
        """They are checked by whom reads them."""


@contextmanager
def _opened(path: Place, known: StoredFile, *, direct: bool) -> Generator[OpenedFile]:
    how = ReadPattern.DIRECT if direct else ReadPattern.BY_BLOCKS
    with ExitStack() as closing:
        try:
            file = closing.enter_context(storage_of(path).read(path, how))
        except OSError as error:
            others = _told_of_others(path, known)
            raise CheckpointError(f"{path}: cannot be read: {error}{others}", hint=_HINT) from error
        if file.nbytes != known.nbytes:
            raise CheckpointError(
                f"{path}: cannot be read: it has {file.nbytes} bytes, and had {known.nbytes} when it was saved"
                f"{_told_of_others(path, known)}",
                hint=_HINT,
            )
        yield file


def _told_of_others(path: Place, known: StoredFile) -> str:
    """Returns what is said of checkpoints that share a file; those in a store share none."""
    return told_of_others(path, known) if isinstance(path, Path) else ""


def _whole_buffer(block: Block, buffers: Sequence[memoryview]) -> memoryview:
    """Returns the buffer that a block lies in."""
    return next(buffer for buffer in buffers if buffer.obj is block.data.obj)
