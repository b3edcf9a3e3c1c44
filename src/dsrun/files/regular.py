"""Files whose bytes are to be read: opened only where they are regular ones. Knows nothing of what is in them.

Opening a pipe waits until somebody writes, a device may have no end or do something when it is opened, and a folder
opens like a file. So the type is looked at before, and again of what was opened: the name may mean another by then.
"""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


class NotRegularError(OSError):
    """Something else stands where a regular file is expected; the text says what.

    Args:
        path: path of the thing that is not a regular file.
        mode: mode of that path, as `os.stat` returns it.
    """

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        super().__init__(errno.EINVAL, f"it is {kind}; expected a regular file", os.fspath(path))

    def __str__(self) -> str:
        return str(self.strerror)


def refuse_other_kinds(path: str | os.PathLike[str]) -> None:
    """Refuses a name that a file is to take from a device, a pipe or the like: a rename would destroy it.

    Raises:
        NotRegularError: it is no regular file and no link.
        OSError: it cannot be looked at, but for a name that is free.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise NotRegularError(path, mode)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a file that is there, and returns its descriptor; waits for nobody.

    Args:
        path: the file.
        flags: flags for `os.open`; with O_NOFOLLOW a link is refused as the system does.

    Raises:
        NotRegularError: it is a pipe, a socket, a device or a folder; a device was not opened.
        OSError: it cannot be opened.
    """
    mode = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise NotRegularError(path, mode)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularError(path, mode)
        # Of a regular file it means nothing, but for systems that bring its bytes from a tape first.
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], most_bytes: int | None = None) -> bytes:
    """Returns what is in a file.

    Args:
        path: the file.
        most_bytes: number of bytes to read from the beginning; None for all.

    Raises:
        NotRegularError: see `open_regular`.
        OSError: it cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(-1 if most_bytes is None else most_bytes)


def is_replaceable(path: str | os.PathLike[str], mark: bytes) -> bool:
    """Returns whether nothing of anybody else is lost if a file is replaced: it begins so, is empty, or is not there.

    Args:
        path: the file.
        mark: bytes with which files of the kind begin that may be replaced.

    Raises:
        NotRegularError: it is a pipe, a socket, a device or a folder.
        OSError: it cannot be read.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return True
    with os.fdopen(descriptor, "rb") as file:
        return file.read(len(mark)) in (mark, b"")
