"""A rank's log read as one run of bytes, whatever parts it has and while it grows. The counterpart of `files.py`."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from dsrun.contract.job_paths import JobPaths

#: Read ahead, for records of single lines.
_AHEAD_BYTES = 1 << 16
#: Most logs that are held open.
_MOST_OPEN = 64


class LogParts:
    """The logs of a job's ranks.

    Args:
        folder: folder of the logs.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = JobPaths(folder)
        self._open: OrderedDict[int, _OpenLog] = OrderedDict()

    def read(self, rank: int, offset: int, length: int) -> bytes:
        """Returns up to `length` bytes of a rank's whole log; fewer at its end, none where there is no log.

        Cheapest where offsets grow.
        """
        log = self._open.get(rank)
        if log is None:
            while len(self._open) >= _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            log = self._open[rank] = _OpenLog(self._paths, rank)
        else:
            self._open.move_to_end(rank)
        return log.read(offset, length)

    def last_write_s(self, rank: int) -> float:
        """Returns when a rank's log was last written to, in seconds since the epoch; 0 where there is none."""
        try:
            return self._paths.log(rank).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def close(self) -> None:
        """Gives all descriptors back."""
        for log in self._open.values():
            log.close()
        self._open.clear()


class _OpenLog:
    """One rank's log, open at one of its parts."""

    def __init__(self, paths: JobPaths, rank: int) -> None:
        self._paths = paths
        self._rank = rank
        self._number = 1
        #: Offset of the present part's first byte in the whole log.
        self._start = 0
        self._descriptor: int | None = None
        self._ahead = b""
        self._ahead_at = 0

    def read(self, offset: int, length: int) -> bytes:
        at = offset - self._ahead_at
        if at >= 0 and at + length <= len(self._ahead):
            return self._ahead[at : at + length]
        data = self._read_parts(offset, max(length, _AHEAD_BYTES))
        self._ahead, self._ahead_at = data, offset
        return data[:length]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_parts(self, offset: int, length: int) -> bytes:
        if offset < self._start:
            self.close()
            self._number, self._start = 1, 0
        pieces: list[bytes] = []
        while length and self._ensure_open() and self._descriptor is not None:
            # Asked before the read: a part that has got its number does not grow any more.
            is_complete = self._paths.log_part(self._rank, self._number).exists()
            size = os.fstat(self._descriptor).st_size
            if data := os.pread(self._descriptor, length, offset - self._start) if offset - self._start < size else b"":
                pieces.append(data)
                offset += len(data)
                length -= len(data)
            elif is_complete:
                self.close()
                self._start += size
                self._number += 1
            else:
                break
        return b"".join(pieces)

    def _ensure_open(self) -> bool:
        """Opens the present part; returns whether there is one."""
        if self._descriptor is None:
            numbered = self._paths.log_part(self._rank, self._number)
            self._descriptor = _opened(numbered)
            if self._descriptor is None:
                self._descriptor = _opened(self._paths.log(self._rank))
                if numbered.exists():
                    # The log was continued in between: the one just opened may be the part after this.
                    self.close()
                    self._descriptor = _opened(numbered)
        return self._descriptor is not None


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
