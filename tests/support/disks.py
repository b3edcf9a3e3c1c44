"""Disks that fail as a test says: the system's calls, but for those that a rule takes over."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from dsrun.direct_io.calls import OsCalls

#: Byte of the file, and bytes asked for -> the error's number, how many bytes to move at most, or None to do it all.
Rule = Callable[[int, int], "OSError | int | None"]


class FailingDisk(OsCalls):
    """Calls of the system with rules for reads and writes; counts both."""

    def __init__(
        self,
        *,
        read: Rule = lambda at, nbytes: None,
        write: Rule = lambda at, nbytes: None,
        refused_flags: int = 0,
        free: int | None = None,
    ) -> None:
        self.on_read, self.on_write = read, write
        self.refused_flags = refused_flags
        self.free = free
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        #: Writes wait here while it is set.
        self.hold_writes = threading.Event()
        self.hold_writes.set()

    def open(self, path: str, flags: int, mode: int) -> int:
        if self.refused_flags and flags & self.refused_flags == self.refused_flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, mode)

    def read(self, fd: int, into: memoryview, at: int) -> int:
        self.reads.append((at, into.nbytes))
        return super().read(fd, into[: self._limit(self.on_read(at, into.nbytes), into.nbytes)], at)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        assert self.hold_writes.wait(60), "nobody let the writes go"
        self.writes.append((at, data.nbytes))
        return super().write(fd, data[: self._limit(self.on_write(at, data.nbytes), data.nbytes)], at)

    def free_bytes(self, fd: int) -> tuple[int, int]:
        number, free = super().free_bytes(fd)
        return number, free if self.free is None else self.free

    @staticmethod
    def _limit(ruled: OSError | int | None, nbytes: int) -> int:
        if isinstance(ruled, OSError):
            raise ruled
        return nbytes if ruled is None else ruled


def failure(number: int) -> OSError:
    """Returns the error that the system would raise."""
    return OSError(number, os.strerror(number))
