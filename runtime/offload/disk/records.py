"""Records of tensors on a disk: addresses for life, memory while they are here, and one stretch of the disk each.

A record has parts (masters, then optimizer states), which lie one behind the other in memory as on the disk, so that
one read in order brings them all. Whose values they are, and when they are wanted, is the business of who made them.

[Note: shown] Records are brought and put away while a step works on them, each part whole and past the page cache.
Between steps all of them are *shown*: the file itself is mapped where they have their addresses, so whoever reads or
sets a few values does so in place, through the page cache, and moves no more than the pages that it touches. The
kernel sees to it that the next direct read finds what was written. Where a disk fails under a mapping, the process ends
(SIGBUS).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch import Tensor

from dsrun.direct_io.extent_file import Extent, ExtentFile
from dsrun.direct_io.pending import PendingIo
from dsrun.direct_io.settings import ALIGN, round_up
from dsrun.errors import OffloadError

from .file_addresses import FileAddresses
from .moving_pages import HUGE_BYTES, AddressSpace, Frame, cut_frames, room_for_frames

_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class _Part:
    """Consecutive bytes of a record.

    Attributes:
        memory: its addresses.
        extent: its place on the disk.
        is_written: whether that holds its values; until then they are zeros.
    """

    memory: memoryview
    extent: Extent
    is_written: bool = False


@dataclass(slots=True)
class _Record:
    """Where a record is.

    Attributes:
        address: address at which the record's memory begins.
        nbytes: bytes of the record's memory.
        parts: parts of the record, in order.
        frame: its memory; None while it is away.
        coming: reads in progress.
        going: writes in progress, after which the frame is free.
        is_held: somebody uses it.
    """

    address: int
    nbytes: int
    parts: list[_Part]
    frame: Frame | None = None
    coming: list[PendingIo] = field(default_factory=list[PendingIo])
    going: list[PendingIo] = field(default_factory=list[PendingIo])
    is_held: bool = False


class DiskRecords:
    """Records that come and go. Methods may be called from several threads; each waits for the other's.

    Args:
        file: file that gets an extent for each part; it is laid out here, and read and written by nobody else.
        names: names of the records in error messages.
        parts: names and bytes of the parts of each record, in the order of `names`.
        frames: number of records that may be in memory at once, those on their way to and from the disk included.
        memory: function that makes the frames' memory: a given number of bytes of pages that are not page-locked.
        read_ahead: `expect` begins to read.
        write_behind: `put_away` does not wait for the disk.

    Attributes:
        frame_memory: memory of all frames.

    Raises:
        OffloadError: there is not so much room on the disk.
    """

    def __init__(
        self,
        file: ExtentFile,
        names: Sequence[str],
        parts: Sequence[Sequence[tuple[str, int]]],
        *,
        frames: int,
        memory: Callable[[int], Tensor],
        read_ahead: bool = True,
        write_behind: bool = True,
    ) -> None:
        self._file = file
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._lock = RLock()
        self._is_shown = False
        extents = [self._reserve(name, of_record) for name, of_record in zip(names, parts, strict=True)]
        # Addresses are as far from each other as bytes of the file: so one mapping can show them all.
        self._space = AddressSpace(file.reserved_bytes)
        self._records = [self._record(of_record) for of_record in extents]
        file.allocate()
        largest = max(record.nbytes for record in self._records)
        count = min(frames, len(self._records))
        self.frame_memory = memory(room_for_frames(count, largest))
        self._free = cut_frames(bytes_of(self.frame_memory), largest)[:count]

    @property
    def nbytes(self) -> int:
        """Bytes of all records, and between them: on the disk, and of addresses."""
        return self._file.reserved_bytes

    def everything(self, nbytes: int) -> Tensor:
        """Returns the first bytes of all records as one tensor, for who keeps account of addresses."""
        return torch.frombuffer(self._space.view(0, nbytes), dtype=torch.uint8) if nbytes else _EMPTY

    def tensor(self, index: int, part: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a flat tensor in a part, whose storage is its bytes alone; it may be used while the record is here.

        Args:
            index: number of the record.
            part: number of the part.
            start: byte of the part at which it begins.
            numel: elements.
            dtype: dtype of the elements.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        memory = self._records[index].parts[part].memory
        return torch.frombuffer(memory[start : start + numel * dtype.itemsize], dtype=dtype)

    def addresses(self) -> FileAddresses:
        """Returns where in files the records' bytes lie."""
        return FileAddresses(self._space.address, self._file)

    def expect(self, index: int) -> None:
        """Begins to read a record that will be wanted soon, if there is a frame for it that nobody needs."""
        with self._lock:
            record = self._records[index]
            if self._read_ahead and record.frame is None and self._free and not self._is_shown:
                with suppress(OffloadError):  # of its last write; who wants the record meets it again
                    self._start_to_come(record)

    def bring(self, index: int) -> None:
        """Returns when a record is here; it stays until `put_away`.

        Raises:
            OffloadError: it cannot be read, or is not what was written; or its last write has failed.
        """
        with self._lock:
            record = self._records[index]
            assert not record.is_held, "a record is brought once, then put away"
            assert not self._is_shown, "records are brought while they are hidden"
            try:
                if record.frame is None:
                    self._start_to_come(record)
                self._wait(record.going)
                self._wait(record.coming)
            except OffloadError:
                if record.frame is not None:
                    self._finish(record)
                raise
            record.is_held = True

    def put_away(self, index: int, *, changed: Sequence[int] | None = None) -> None:
        """Lets go of a record's memory, after its changed parts are on the disk.

        Args:
            index: number of the record, which must have been brought into memory.
            changed: numbers of the parts that were written to; None: all.

        Raises:
            OffloadError: it cannot be written, where that is waited for.
        """
        with self._lock:
            record = self._records[index]
            assert record.is_held, "what was not brought cannot be put away"
            record.is_held = False
            for number in range(len(record.parts)) if changed is None else changed:
                part = record.parts[number]
                record.going.append(self._file.write(part.extent, part.memory))
                part.is_written = True
            if not (self._write_behind and record.going):
                self._finish(record)

    @contextmanager
    def held(self, index: int, *, changed: Sequence[int] = ()) -> Generator[None]:
        """Has a record here for as long as the context is open.

        Args:
            index: number of the record.
            changed: numbers of the parts that are written to meanwhile.
        """
        self.bring(index)
        try:
            yield
        finally:
            self.put_away(index, changed=changed)

    def is_here(self, index: int) -> bool:
        """Whether a record has memory now."""
        return self._records[index].frame is not None

    def settle(self) -> None:
        """Returns when nothing is on its way, and only what is held has memory.

        Raises:
            OffloadError: something could not be written.
        """
        with self._lock:
            for record in self._records:
                if record.frame is not None and not record.is_held:
                    self._finish(record)

    def show(self) -> None:
        """Has all records where their addresses are, by way of the page cache, until `hide`; see [Note: shown].

        Raises:
            OffloadError: something could not be written; or a file has been cut short.
        """
        with self._lock:
            if self._is_shown:
                return
            self.settle()
            assert not any(record.is_held for record in self._records), "what is held cannot be shown"
            for fd, piece in self._file.layout():
                if os.fstat(fd).st_size < piece.at + piece.nbytes:
                    raise OffloadError(
                        f"the file of {self._records[0].parts[0].extent.name} and others ends at byte "
                        f"{os.fstat(fd).st_size}: it was cut short",
                        hint="what lay there is lost: go on from the last checkpoint",
                    )
                self._space.show_file(piece.start, piece.nbytes, fd, piece.at)
            self._is_shown = True

    def hide(self) -> None:
        """Ends `show`; what was written meanwhile is on its way to the disk."""
        with self._lock:
            if not self._is_shown:
                return
            if self._file.verifies:
                for record in self._records:
                    self._sum_up(record)
            self._space.empty()
            self._is_shown = False
            for fd in {fd for fd, _ in self._file.layout()}:
                # Else the cache would fill with what is read past it from here on.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def note_written(self, index: int, part: int) -> None:
        """Says that a part has values from here on, which may be written while it is shown: zeros at first."""
        found = self._records[index].parts[part]
        if not found.is_written and self._is_shown:
            found.is_written = True
            self._file.note_written(found.extent)

    def _sum_up(self, record: _Record) -> None:
        """Takes checksums of parts that somebody may have written to while they were shown."""
        for part in record.parts:
            if part.is_written and self._space.was_touched(part.extent.offset, part.extent.nbytes):
                self._file.note_written(part.extent, part.memory)

    def _reserve(self, name: str, of_record: Sequence[tuple[str, int]]) -> list[Extent]:
        """Reserves a record's parts, one behind the other; large ones begin where whole huge pages can move."""
        align = HUGE_BYTES if sum(nbytes for _, nbytes in of_record) >= HUGE_BYTES else ALIGN
        return [
            self._file.reserve(f"{part} of {name}", nbytes, align=ALIGN if number else align)
            for number, (part, nbytes) in enumerate(of_record)
        ]

    def _record(self, extents: Sequence[Extent]) -> _Record:
        start, stop = extents[0].offset, extents[-1].offset + round_up(extents[-1].nbytes)
        parts = [_Part(self._space.view(extent.offset, extent.nbytes), extent) for extent in extents]
        return _Record(self._space.address + start, stop - start, parts)

    def _start_to_come(self, record: _Record) -> None:
        """Gives a record a frame, and starts to fill it; where that fails, it has none."""
        frame = self._free_frame()
        frame.go_to(record.address, record.nbytes)
        record.frame = frame
        for part in record.parts:
            if part.is_written:
                try:
                    record.coming.append(self._file.read(part.extent, part.memory))
                except OffloadError:
                    self._finish(record)
                    raise
            else:
                # What the frame held last is another record's.
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(part.memory)), 0, part.memory.nbytes)

    def _free_frame(self) -> Frame:
        """Returns a frame; where all are taken, that of a record which goes, or was expected and is not wanted yet."""
        if not self._free:
            here = [record for record in self._records if record.frame is not None and not record.is_held]
            assert here, "all frames are held"
            self._finish(next((record for record in here if record.going), here[-1]))
        return self._free.pop()

    def _finish(self, record: _Record) -> None:
        """Takes the frame of a record that nobody holds, once the disk needs it no more.

        What was read ahead for nobody is dropped, with its errors: they come back with the next read.
        """
        with suppress(OffloadError):
            self._wait(record.coming)
        try:
            self._wait(record.going)
        finally:
            self._give_frame_back(record)

    def _give_frame_back(self, record: _Record) -> None:
        assert record.frame is not None, "it has one while it comes, is here or goes"
        record.frame.come_back()
        self._free.append(record.frame)
        record.frame = None

    @staticmethod
    def _wait(under_way: list[PendingIo]) -> None:
        """Waits for all, whichever fails: the memory is the disk's until then."""
        done, under_way[:] = list(under_way), []
        errors = [error for error in (_outcome(pending) for pending in done) if error is not None]
        if errors:
            raise errors[0]


def bytes_of(memory: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor of host memory; who uses it keeps the tensor."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


def _outcome(pending: PendingIo) -> BaseException | None:
    try:
        pending.wait()
    except BaseException as error:
        return error
    return None
