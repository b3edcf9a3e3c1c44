"""What is asked of the operating system: the one seam at which tests make a disk fail."""

from __future__ import annotations

import errno
import os
from typing import Protocol


class DiskCalls(Protocol):
    """The calls of `os` that move bytes and make room for them; all raise OSError."""

    def open(self, path: str, flags: int, mode: int) -> int:
        """See `os.open`."""
        ...

    def close(self, fd: int) -> None:
        """See `os.close`."""
        ...

    def read(self, fd: int, into: memoryview, at: int) -> int:
        """Reads into memory from byte `at`; returns how many bytes were read, 0 at the end of the file."""
        ...

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """Writes memory from byte `at` on; returns how many bytes were written."""
        ...

    def allocate(self, fd: int, nbytes: int) -> bool:
        """Makes the file so long; returns whether the room is its own from now on."""
        ...

    def free_bytes(self, fd: int) -> tuple[int, int]:
        """Returns a number for the file system, and the bytes that this user may still write there."""
        ...


class OsCalls:
    """Those of this system. `os` lets go of the interpreter's lock for each."""

    def open(self, path: str, flags: int, mode: int) -> int:
        """See `DiskCalls`."""
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        """See `DiskCalls`."""
        os.close(fd)

    def read(self, fd: int, into: memoryview, at: int) -> int:
        """See `DiskCalls`."""
        return os.preadv(fd, [into], at)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """See `DiskCalls`."""
        return os.pwritev(fd, [data], at)

    def allocate(self, fd: int, nbytes: int) -> bool:
        """See `DiskCalls`."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            # Where the file system cannot, the C library writes a byte a block, which O_DIRECT refuses with EINVAL.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, nbytes)
            return False
        return True

    def free_bytes(self, fd: int) -> tuple[int, int]:
        """See `DiskCalls`."""
        stat = os.fstatvfs(fd)
        return os.fstat(fd).st_dev, stat.f_bavail * stat.f_frsize
