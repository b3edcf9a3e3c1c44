"""Where the bytes behind addresses lie in files: for who would rather read the file than the memory.

What an entry's bytes are is what its tensor shows: where states lie in another format on the drive, a tensor that shows
them so is found here, and one that was unpacked from them is ordinary memory.
"""

from __future__ import annotations

from bisect import bisect_right

from torch import Tensor

from dsrun.direct_io.extent_file import ExtentFile

from ...protocols import FileStretch


class FileAddresses:
    """Addresses that stand for the bytes of a file, in order; whether they have memory now or not.

    Args:
        address: the first.
        file: laid down.
    """

    def __init__(self, address: int, file: ExtentFile) -> None:
        self._address = address
        self._nbytes = file.reserved_bytes
        self._layout = list(file.layout())
        self._starts = [piece.start for _, piece in self._layout]

    def find(self, values: Tensor) -> list[FileStretch] | None:
        """Returns where a flat tensor's bytes lie, in order; None where it is elsewhere.

        They are what the tensor shows between steps, once all writes have ended.
        """
        start = values.data_ptr() - self._address if values.device.type == "cpu" else -1
        if not 0 <= start < self._nbytes:
            return None
        found: list[FileStretch] = []
        stop = start + values.nbytes
        while start < stop:
            descriptor, piece = self._layout[bisect_right(self._starts, start) - 1]
            inside = start - piece.start
            nbytes = min(piece.nbytes - inside, stop - start)
            found.append(FileStretch(descriptor, piece.at + inside, nbytes))
            start += nbytes
        return found
