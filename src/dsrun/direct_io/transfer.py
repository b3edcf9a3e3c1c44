"""Moves one piece between memory and its file, whole or not at all; every failure names path, extent and byte.

The part of a piece that direct calls can move (memory and length multiples of `ALIGN`) goes straight there; the rest
goes through a buffer of the thread, in blocks padded with zeros, for which extents have room.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from dsrun.direct_io.buffers import huge_buffer
from dsrun.direct_io.calls import DiskCalls
from dsrun.direct_io.data_file import DataFile
from dsrun.direct_io.settings import ALIGN, round_up
from dsrun.errors import OffloadError

#: Memory that cannot be moved directly goes through so much at once.
_BOUNCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A piece on its way.

    Attributes:
        file: file in which the piece lies.
        at: byte of the file at which it begins, a multiple of `ALIGN`.
        memory: the piece's bytes.
        address: address of `memory`; None where it is not known.
        extent: name of the extent, for errors.
        start: byte of the extent at which the piece begins.
        sums: checksums of the extent's pieces, by their start; None: none are kept.
    """

    file: DataFile
    at: int
    memory: memoryview
    address: int | None
    extent: str
    start: int
    sums: dict[int, int] | None


class Mover:
    """Runs the transfers of one thread.

    Args:
        calls: operating system's file calls; see `DiskCalls`.
        count: callback that gets the number of bytes that each call moved.
    """

    def __init__(self, calls: DiskCalls, count: Callable[[int], None]) -> None:
        self._calls = calls
        self._count = count
        self._bounce: memoryview | None = None

    def read(self, transfer: Transfer) -> None:
        """Fills the transfer's memory from its file.

        Raises:
            OffloadError: it cannot be read, or is not what was written.
        """
        straight = _straight_bytes(transfer)
        self._read_into(transfer, 0, transfer.memory[:straight])
        for start in range(straight, transfer.memory.nbytes, _BOUNCE_BYTES):
            part = transfer.memory[start : start + _BOUNCE_BYTES]
            bounce = self._bounce_of(part.nbytes)
            self._read_into(transfer, start, bounce)
            part[:] = bounce[: part.nbytes]
        if transfer.sums is not None:
            # What was written through a mapping may have none.
            wanted = transfer.sums.get(transfer.start)
            found = None if wanted is None else checksum(transfer.memory)
            if found != wanted:
                raise _failure(
                    transfer, 0, f"reads back otherwise than it was written (checksum {found:016x}, not {wanted:016x})"
                )

    def write(self, transfer: Transfer) -> None:
        """Writes the transfer's memory to its file.

        Raises:
            OffloadError: it cannot be written.
        """
        if transfer.sums is not None:
            transfer.sums[transfer.start] = checksum(transfer.memory)
        straight = _straight_bytes(transfer)
        self._write_from(transfer, 0, transfer.memory[:straight])
        for start in range(straight, transfer.memory.nbytes, _BOUNCE_BYTES):
            part = transfer.memory[start : start + _BOUNCE_BYTES]
            bounce = self._bounce_of(part.nbytes)
            bounce[: part.nbytes] = part
            bounce[part.nbytes :] = bytes(bounce.nbytes - part.nbytes)
            self._write_from(transfer, start, bounce)

    def _read_into(self, transfer: Transfer, start: int, into: memoryview) -> None:
        done = 0
        while done < into.nbytes:
            try:
                moved = self._calls.read(transfer.file.fd, into[done:], transfer.at + start + done)
            except OSError as error:
                raise _failure(transfer, start + done, f"cannot be read: {error.strerror}") from error
            if moved == 0:
                raise _failure(transfer, start + done, "cannot be read: the file ends there, so it was cut short")
            self._count(moved)
            done += moved

    def _write_from(self, transfer: Transfer, start: int, data: memoryview) -> None:
        done = 0
        while done < data.nbytes:
            try:
                moved = self._calls.write(transfer.file.fd, data[done:], transfer.at + start + done)
                if moved == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise _failure(transfer, start + done, f"cannot be written: {error.strerror}") from error
            self._count(moved)
            done += moved

    def _bounce_of(self, nbytes: int) -> memoryview:
        if self._bounce is None:
            self._bounce = memoryview(huge_buffer(_BOUNCE_BYTES))
        return self._bounce[: round_up(nbytes)]


def checksum(memory: memoryview) -> int:
    """Returns the xxh3 of some bytes, 64 bits."""
    return xxhash.xxh3_64_intdigest(memory)


def _straight_bytes(transfer: Transfer) -> int:
    """Returns how many of a piece's bytes a direct call moves from or to where they are."""
    if transfer.address is None or transfer.address % ALIGN:
        return 0
    return transfer.memory.nbytes // ALIGN * ALIGN


def _failure(transfer: Transfer, start: int, what: str) -> OffloadError:
    return OffloadError(
        f"{transfer.file.folder}: {transfer.extent}, byte {transfer.start + start} (byte {transfer.at + start} of the "
        f"file) {what}",
        hint="what lies there is lost: see the disk's state, and go on from the last checkpoint",
    )
