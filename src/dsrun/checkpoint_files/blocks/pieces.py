"""One block of a file, read in pieces: each is hashed, and then handed on, while the processor has it in its cache.

Reading, hashing and copying a block of 16 MiB one after the other brings every byte from memory three times. Opens no
file, and knows no tensors.

[Note: never read in place] Pieces are read to spare memory on huge pages and copied from there, also where they could
be read to the place they are for. A disk fills a huge page with one transfer and needs 512 of them for as many bytes of
small pages, which is what most tensors lie on: 512 MiB took 0.57 s in place there and 0.28 s by way of spare memory,
and 0.24 and 0.25 s where tensors lie on huge pages too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xxhash import xxh3_64

#: What is read at a time: small beside a cache, large beside the cost of asking a disk.
PIECE_BYTES = 2 << 20


class Sink(Protocol):
    """Who wants bytes of a file."""

    def take(self, first: int, data: memoryview) -> None:
        """Copies what it wants of the bytes of the file from `first` on, which were not checked yet.

        It is called in several threads, for other bytes each time.
        """
        ...


def read_pieces(fetch: Callable[[int, int], memoryview], first: int, nbytes: int, sink: Sink) -> str:
    """Hands bytes [first, first + nbytes) of a file to a sink, and returns their xxh3-64 in hexadecimal.

    Args:
        fetch: (where in the file, bytes) returns so many bytes, until the next are asked for.
        first: a multiple of `PIECE_BYTES`.
        nbytes: number of bytes to read.
        sink: receiver that takes each piece of the bytes; see `Sink`.
    """
    digest = xxh3_64()
    for start in range(first, first + nbytes, PIECE_BYTES):
        piece = fetch(start, min(PIECE_BYTES, first + nbytes - start))
        digest.update(piece)
        sink.take(start, piece)
    return digest.hexdigest()
