"""Where the bytes of an extent lie in one file or several. Pure arithmetic.

[Note: stripes]
All files together are one line of bytes, dealt out in stripes: stripe i lies in file i mod n. A piece is what one call
moves: the part of an extent in one stripe. So one file is cut just like several, and long extents keep all disks busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an extent that lies in one stripe.

    Attributes:
        file: number of the file.
        at: byte in the file at which it begins.
        start: byte of the extent at which it begins.
        nbytes: its length.
    """

    file: int
    at: int
    start: int
    nbytes: int


def pieces(offset: int, nbytes: int, *, stripe_bytes: int, files: int) -> Iterator[Piece]:
    """Yields the pieces of an extent, in order.

    Args:
        offset: byte at which the extent begins on the line of all bytes.
        nbytes: size of the extent in bytes.
        stripe_bytes: length of a stripe.
        files: number of files.
    """
    end, at = offset + nbytes, offset
    while at < end:
        stripe, inside = divmod(at, stripe_bytes)
        size = min(stripe_bytes - inside, end - at)
        yield Piece(stripe % files, stripe // files * stripe_bytes + inside, at - offset, size)
        at += size


def stretches(total: int, *, stripe_bytes: int, files: int) -> Iterator[Piece]:
    """Yields what lies together in one file, of a line of `total` bytes: all of it where there is one file."""
    whole_line = max(total, 1)
    return pieces(0, total, stripe_bytes=whole_line if files == 1 else stripe_bytes, files=files)


def file_sizes(total: int, *, stripe_bytes: int, files: int) -> list[int]:
    """Returns how long each file must be for a line of `total` bytes."""
    whole, rest = divmod(total, stripe_bytes)
    sizes = [(whole // files + (file < whole % files)) * stripe_bytes for file in range(files)]
    sizes[whole % files] += rest
    return sizes
