"""A file without a name in a folder, and room for what it is to hold, all of it before anything is written."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import weakref
from collections.abc import Sequence

from dsrun.direct_io.buffers import huge_buffer
from dsrun.direct_io.calls import DiskCalls
from dsrun.direct_io.opening import open_anonymous
from dsrun.direct_io.settings import ALIGN
from dsrun.errors import OffloadError
from dsrun.units import format_bytes

_log = logging.getLogger(__name__)


class DataFile:
    """An open file.

    It is closed when the last transfer that refers to it is done: a free number could soon be another file's.

    Args:
        folder: folder in which the file is made.
        what: purpose of the file, for error messages.
        calls: operating system's file calls; see `DiskCalls`.

    Raises:
        OffloadError: no file can be made there.
    """

    def __init__(self, folder: str, *, what: str, calls: DiskCalls) -> None:
        try:
            opened = open_anonymous(folder, calls.open)
        except OSError as error:
            raise OffloadError(
                f"{folder}: no file can be made there for {what}: {error.strerror}",
                hint="name an existing folder that you may write to",
            ) from error
        self.folder = folder
        self.fd = opened.fd
        self._closing = weakref.finalize(self, calls.close, opened.fd)
        self._closing.atexit = False  # the process's end closes it, and threads may still be at work on it
        if not opened.direct:
            _say_buffered(folder)

    def close(self) -> None:
        """Lets go of it, and of the room it has."""
        self._closing()

    @property
    def is_direct(self) -> bool:
        """Whether what is moved leaves the page cache out."""
        return bool(fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_DIRECT)

    @property
    def held_bytes(self) -> int:
        """Room that it has."""
        return os.fstat(self.fd).st_blocks * 512

    def lay_down(self, nbytes: int, *, what: str, calls: DiskCalls) -> None:
        """Gives it so much room, and finds out whether direct calls work in it.

        Raises:
            OffloadError: there is not so much.
        """
        try:
            owned = calls.allocate(self.fd, nbytes)
        except OSError as error:
            _, free = calls.free_bytes(self.fd)
            raise _no_room(self.folder, nbytes, free, what, error.strerror) from error
        if not owned:
            _log.warning("%s: the file system reserves no room, so a full disk shows only when it is full", self.folder)
        if self.is_direct and not self._moves_directly(calls):
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            _say_buffered(self.folder)

    def _moves_directly(self, calls: DiskCalls) -> bool:
        """Whether a direct call works; some file systems take the flag and refuse the calls."""
        try:
            calls.read(self.fd, memoryview(huge_buffer(ALIGN)), 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise OffloadError(f"{self.folder}: the new file cannot be read: {error.strerror}") from error
        return True


def check_room(files: Sequence[DataFile], sizes: Sequence[int], *, what: str, calls: DiskCalls) -> None:
    """Refuses what does not fit before anything is laid down; folders may share a file system.

    Args:
        files: files that are about to get their room on disk.
        sizes: bytes each is to hold.
        what: purpose of the files, for error messages.
        calls: operating system's file calls; see `DiskCalls`.

    Raises:
        OffloadError: there is not so much room.
    """
    missing: dict[int, int] = {}
    found: dict[int, tuple[str, int]] = {}
    for file, nbytes in zip(files, sizes, strict=True):
        number, free = calls.free_bytes(file.fd)
        missing[number] = missing.get(number, 0) + max(0, nbytes - file.held_bytes)
        found.setdefault(number, (file.folder, free))
    for number, (folder, free) in found.items():
        if missing[number] > free:
            raise _no_room(folder, missing[number], free, what, os.strerror(errno.ENOSPC))


def _no_room(folder: str, needed: int, free: int, what: str, reason: str | None) -> OffloadError:
    return OffloadError(
        f"{folder}: {what} need {format_bytes(needed)} there; {format_bytes(free)} are free ({reason})",
        hint="make room, name another path or several, or keep more in memory",
    )


def _say_buffered(folder: str) -> None:
    _log.warning("%s: the file system refuses O_DIRECT, so what is moved goes through the page cache", folder)
