"""Named extents in files without a name, one a path: room first, then reads and writes side by side.

What lies in an extent, and when it may be overwritten, is the business of who reserved it; nothing here is durable.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsrun.direct_io.buffers import address_of
from dsrun.direct_io.calls import DiskCalls, OsCalls
from dsrun.direct_io.counts import IoCounts, IoTally
from dsrun.direct_io.data_file import DataFile, check_room
from dsrun.direct_io.pending import IoQueue, PendingIo
from dsrun.direct_io.settings import ALIGN, IoSettings, round_up
from dsrun.direct_io.stripes import Piece, file_sizes, pieces, stretches
from dsrun.direct_io.transfer import Mover, Transfer, checksum


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of the files that is read and written as a whole.

    Attributes:
        name: name of the extent in error messages.
        nbytes: bytes that the extent holds; its room on disk is rounded up to `ALIGN`.
        offset: byte at which the extent begins on the line of all bytes; see [Note: stripes].
    """

    name: str
    nbytes: int
    offset: int


class ExtentFile:
    """Opens a file in each path, and counts what is moved; threads start with the first read or write.

    Args:
        paths: existing folders, over which extents are striped.
        settings: sizes and depths for reads and writes, and whether to check checksums.
        what: purpose of the file, for error messages, e.g. `optimizer states of rank 0`.
        calls: file calls of the operating system; None for the real ones. Tests pass some that fail.

    Raises:
        OffloadError: no file can be made in one of the paths.
    """

    def __init__(
        self, paths: Sequence[str], settings: IoSettings, *, what: str, calls: DiskCalls | None = None
    ) -> None:
        assert paths, "there is nowhere to put a file"
        self._what = what
        self._settings = settings
        self._calls = calls or OsCalls()
        self._files = [DataFile(path, what=what, calls=self._calls) for path in paths]
        self._end = 0
        self._allocated = 0
        self._extents: dict[str, Extent] = {}
        self._writes: dict[str, PendingIo] = {}
        self._sums: dict[str, dict[int, int]] = {}
        self._tallies = (IoTally(), IoTally())
        self._queues: list[IoQueue[Transfer]] = []  # of reads and of writes, once there are some
        weakref.finalize(self, _stop, self._queues)

    def reserve(self, name: str, nbytes: int, *, align: int = ALIGN) -> Extent:
        """Notes an extent behind the last one; `allocate` makes room for it.

        Args:
            name: no other extent has it.
            nbytes: size of the extent in bytes, at least 1.
            align: alignment of the extent's first byte, a multiple of `ALIGN`.
        """
        assert nbytes > 0, f"{name}: an extent of {nbytes} bytes"
        assert name not in self._extents, f"{name}: there is such an extent already"
        extent = Extent(name, nbytes, -(-self._end // align) * align)
        self._extents[name] = extent
        self._end = extent.offset + round_up(nbytes)
        return extent

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all extents, and between them: of all files together."""
        return self._end

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is left out in all paths."""
        return all(file.is_direct for file in self._files)

    def allocate(self) -> None:
        """Lays the files down, as long as all extents need; what follows does not run out of room.

        Raises:
            OffloadError: there is not so much room; it names the path, what is needed and what is free.
        """
        sizes = file_sizes(self._end, stripe_bytes=self._settings.call_bytes, files=len(self._files))
        check_room(self._files, sizes, what=self._what, calls=self._calls)
        for file, nbytes in zip(self._files, sizes, strict=True):
            if nbytes:
                file.lay_down(nbytes, what=self._what, calls=self._calls)
        self._allocated = self._end

    def write(self, extent: Extent, data: memoryview) -> PendingIo:
        """Starts to write an extent; the memory is the disk's until the result has been waited for.

        Args:
            extent: extent of this file, with no read or write under way.
            data: its bytes. Memory aligned to `ALIGN` is written from where it is, other memory through a buffer.
        """
        before = self._writes.get(extent.name)
        assert before is None or before.is_done, f"{extent.name}: a write is under way already"
        pending = self._both_queues()[1].put(self._transfers(extent, data))
        self._writes[extent.name] = pending
        return pending

    def read(self, extent: Extent, into: memoryview) -> PendingIo:
        """Starts to read an extent; the memory is the disk's until the result has been waited for.

        Args:
            extent: extent of this file that was written; its last write has ended.
            into: memory that receives the bytes; as in `write`, directly if aligned to `ALIGN`, else through a buffer.

        Raises:
            OffloadError: its last write has failed, so what lies there is a mixture.
        """
        written = self._writes.get(extent.name)
        assert written is not None, f"{extent.name}: nothing was written there yet"
        assert written.is_done, f"{extent.name}: it is being written"
        written.wait()
        return self._both_queues()[0].put(self._transfers(extent, into))

    def layout(self) -> Iterator[tuple[int, Piece]]:
        """Yields which bytes of which file the line of all extents is: (descriptor, stretch), for who maps them."""
        found = stretches(self._end, stripe_bytes=self._settings.call_bytes, files=len(self._files))
        return ((self._files[piece.file].fd, piece) for piece in found)

    def note_written(self, extent: Extent, data: memoryview | None = None) -> None:
        """Takes note that an extent was written through a mapping of its file.

        Args:
            extent: extent of this file, with no read or write under way.
            data: new content of the extent; None if its checksums still hold, or if it has none and is not to be
                checked.
        """
        self._writes.setdefault(extent.name, PendingIo(0))  # one that has failed stays so
        if data is not None and self._settings.verify:
            self._sums[extent.name] = {
                transfer.start: checksum(transfer.memory) for transfer in self._transfers(extent, data)
            }

    @property
    def verifies(self) -> bool:
        """Whether what is read is compared with its checksums."""
        return self._settings.verify

    def retune(self, settings: IoSettings) -> None:
        """Takes other settings; what was written is forgotten, for stripes have another length."""
        self._end_queues()
        self._settings = settings
        self._writes.clear()
        self._sums.clear()
        self.allocate()

    def counts(self) -> IoCounts:
        """Returns what was moved so far."""
        read, written = self._tallies
        read_s, write_s = (queue.busy_s for queue in self._queues) if self._queues else (0.0, 0.0)
        return IoCounts(
            read.moved, read.calls, read.earlier_s + read_s, written.moved, written.calls, written.earlier_s + write_s
        )

    def close(self) -> None:
        """Ends what is under way, and lets go of the files, which are gone with that."""
        self._end_queues()
        for file in self._files:
            file.close()

    def _transfers(self, extent: Extent, memory: memoryview) -> list[Transfer]:
        assert self._extents.get(extent.name) == extent, f"{extent.name}: not an extent of this file"
        assert extent.offset < self._allocated, f"{extent.name}: allocate() was not called"
        data = memory.cast("B")
        assert data.nbytes == extent.nbytes, f"{extent.name}: {data.nbytes} bytes of memory for {extent.nbytes}"
        sums = self._sums.setdefault(extent.name, {}) if self._settings.verify else None
        address = address_of(data)
        stripe_bytes = self._settings.call_bytes
        return [
            Transfer(
                file=self._files[piece.file],
                at=piece.at,
                memory=data[piece.start : piece.start + piece.nbytes],
                address=None if address is None else address + piece.start,
                extent=extent.name,
                start=piece.start,
                sums=sums,
            )
            for piece in pieces(extent.offset, extent.nbytes, stripe_bytes=stripe_bytes, files=len(self._files))
        ]

    def _both_queues(self) -> list[IoQueue[Transfer]]:
        """Returns the queues of reads and of writes; they begin with the first use, for threads survive no fork."""
        if not self._queues:
            count = self._settings.calls_at_once
            readers, writers = ([Mover(self._calls, tally.add) for _ in range(count)] for tally in self._tallies)
            self._queues.append(
                IoQueue("dsrun-read", threads=count, run=lambda item, number: readers[number].read(item))
            )
            self._queues.append(
                IoQueue("dsrun-write", threads=count, run=lambda item, number: writers[number].write(item))
            )
        return self._queues

    def _end_queues(self) -> None:
        for tally, queue in zip(self._tallies, self._queues, strict=False):
            queue.close()
            tally.earlier_s += queue.busy_s
        self._queues.clear()


def _stop(queues: list[IoQueue[Transfer]]) -> None:
    """Ends the threads of a file that nobody closed; files close with their last transfer."""
    for queue in queues:
        queue.stop()
