"""One block of a file, read in pieces: each is hashed, and then handed on, while the processor has it in its cache.

Reading, hashing and copying a block of 16 MiB one after the other brings every byte from memory three times. Where a
piece may be read to the place it is for, there is no copy at all. Opens no file, and knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xxhash import xxh3_64

from .calls import DIRECT_BYTES

#: What is read at a time: small beside a cache, large beside the cost of asking a disk.
PIECE_BYTES = 2 << 20
#: Memory that is read to past the page cache begins at a multiple of it. Some old kernels want more, and say so.
DIRECT_MEMORY_BYTES = 512


class Sink(Protocol):
    """Who wants bytes of a file. Both methods are called in several threads, for other bytes each time."""

    def place(self, first: int, nbytes: int, *, alignment: int) -> memoryview | None:
        """Returns where bytes [first, first + nbytes) of the file are to be, if nothing else is to happen to them.

        Args:
            first: a multiple of `PIECE_BYTES`.
            nbytes: not more than `PIECE_BYTES`.
            alignment: the memory has to begin at a multiple of it.
        """
        ...

    def take(self, first: int, data: memoryview) -> None:
        """Copies what it wants of the bytes of the file from `first` on, which were not checked yet."""
        ...


def read_pieces(
    fill: Callable[[memoryview, int, int], None],
    first: int,
    nbytes: int,
    sink: Sink,
    spare: memoryview,
    *,
    direct: bool,
) -> str:
    """Reads bytes [first, first + nbytes) of a file to a sink, and returns their xxh3-64 in hexadecimal.

    Args:
        fill: (memory, where in the file, bytes) reads so many bytes; the memory may be longer.
        first: a multiple of `PIECE_BYTES`.
        nbytes: how many.
        sink: what becomes of them.
        spare: `PIECE_BYTES` of page-aligned memory for pieces that have no place.
        direct: whether the file is read past the page cache.
    """
    digest = xxh3_64()
    alignment = DIRECT_MEMORY_BYTES if direct else 1
    for start in range(first, first + nbytes, PIECE_BYTES):
        count = min(PIECE_BYTES, first + nbytes - start)
        place = None if direct and count % DIRECT_BYTES else sink.place(start, count, alignment=alignment)
        data = spare[: -(-count // DIRECT_BYTES) * DIRECT_BYTES] if place is None else place
        fill(data, start, count)
        digest.update(data[:count])
        if place is None:
            sink.take(start, data[:count])
    return digest.hexdigest()
