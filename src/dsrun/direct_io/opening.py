"""Opens a file that has no name, so that nothing is left of it however its process ends, past the page cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

#: `os.open`: path, flags, mode.
OpenFile = Callable[[str, int, int], int]


@dataclass(frozen=True, slots=True)
class UnnamedFile:
    """An open file without a name.

    Attributes:
        fd: its descriptor; the caller's to close.
        direct: the page cache is left out.
    """

    fd: int
    direct: bool


def open_anonymous(folder: str, open_file: OpenFile = os.open) -> UnnamedFile:
    """Opens a new file in `folder`, for reading and writing.

    Args:
        folder: an existing one; its file system is where the bytes will lie.
        open_file: function that opens the file, called like `os.open`.

    Raises:
        OSError: there is no such folder, or no file may be made in it.
    """
    direct = True
    while True:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            return UnnamedFile(open_file(folder, flags | os.O_TMPFILE, 0o600), direct)
        except OSError as refused:
            try:
                return UnnamedFile(_open_and_unlink(folder, flags, open_file), direct)
            except OSError:
                if not direct:
                    raise refused from None
                # tmpfs of kernels before 6.6 and some network file systems refuse it with EINVAL.
                direct = False


def _open_and_unlink(folder: str, flags: int, open_file: OpenFile) -> int:
    """For file systems without O_TMPFILE (NFS, some overlays)."""
    fd, name = tempfile.mkstemp(prefix=".dsrun-", dir=folder)
    try:
        os.close(fd)
        return open_file(name, flags, 0o600)
    finally:
        os.unlink(name)
