"""Room in a file for tensors of any size, which is used again. Says where they lie; who reads and writes is others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from dsrun.direct_io.counts import IoCounts, added_up
from dsrun.direct_io.extent_file import Extent, ExtentFile
from dsrun.direct_io.pending import PendingIo
from dsrun.direct_io.settings import round_up
from dsrun.errors import OffloadError

#: A file is made anew once it holds so many times what was last needed at once: samples of another length, say.
_LOOSE = 2


class DiskRoom:
    """Extents by their size, in a file that grows as they are asked for; one that is given back is taken first.

    Args:
        open_file: function that makes the file, called when there is something to put there.
    """

    def __init__(self, open_file: Callable[[], ExtentFile]) -> None:
        self._open_file = open_file
        self._file: ExtentFile | None = None
        self._free: dict[int, list[tuple[Extent, Sequence[PendingIo]]]] = {}
        self._taken_bytes = 0
        self._most_bytes = 0
        self._earlier: list[IoCounts] = []

    @property
    def file(self) -> ExtentFile:
        """The file as it is now; opened with the first use.

        Raises:
            OffloadError: it cannot be made.
        """
        if self._file is None:
            self._file = self._open_file()
        return self._file

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return 0 if self._file is None else self._file.reserved_bytes

    def counts(self) -> IoCounts:
        """Returns what was moved so far."""
        return added_up([*self._earlier, *([] if self._file is None else [self._file.counts()])])

    def take(self, nbytes: int) -> Extent:
        """Returns an extent of `nbytes`, rounded up to what a disk moves as a whole.

        Raises:
            OffloadError: there is not so much room.
        """
        size = round_up(nbytes)
        free = self._free.get(size)
        if free:
            extent, under_way = free.pop()
            for pending in under_way:
                with suppress(OffloadError):  # of values that nobody wants any more
                    pending.wait()
        else:
            extent = self.file.reserve(f"an input at byte {self.file.reserved_bytes}", size)
            self.file.allocate()
        self._taken_bytes += size
        self._most_bytes = max(self._most_bytes, self._taken_bytes)
        return extent

    def give_back(self, extent: Extent, under_way: Sequence[PendingIo]) -> None:
        """Takes an extent back.

        Args:
            extent: extent that `take` returned.
            under_way: reads and writes of the extent that may not have ended.
        """
        self._taken_bytes -= extent.nbytes
        self._free.setdefault(extent.nbytes, []).append((extent, tuple(under_way)))

    def begin(self) -> None:
        """Says that nothing is taken and a new round begins: a file much larger than the last one needed goes."""
        assert not self._taken_bytes, "a round begins when all is given back"
        most, self._most_bytes = self._most_bytes, 0
        if most and self.nbytes > _LOOSE * most:
            self.close()

    def close(self) -> None:
        """Ends what is under way, and lets go of the file."""
        self._free.clear()
        if self._file is not None:
            self._file.close()
            self._earlier.append(self._file.counts())
            self._file = None
