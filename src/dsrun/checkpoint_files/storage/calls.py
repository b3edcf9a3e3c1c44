"""The file system as saving uses it: each method is one step that a crash may come before or after.

Tests put a recording one in its place. Names of what is written, and in which order, are decided elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from dsrun.units import format_bytes

#: O_DIRECT wants addresses, offsets and lengths that are multiples of it.
DIRECT_BYTES = 4096


class WriteError(OSError):
    """A file cannot be written; the text names it, why, and what it wants where the disk is full.

    Args:
        path: the file.
        cause: error that the operating system raised.
        nbytes: size of the whole file in bytes; None where it is not known.
    """

    def __init__(self, path: Path, cause: OSError, nbytes: int | None = None) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause), str(path))
        self._room = ""
        if nbytes is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            self._room = f"; it has {format_bytes(nbytes)}"

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written: {self.strerror}{self._room}"


@contextlib.contextmanager
def naming(path: Path, nbytes: int | None = None) -> Generator[None]:
    """Has what goes wrong with a file name it: of an open one the system does not.

    Args:
        path: the file, or a folder of names that are made durable.
        nbytes: size of the whole file in bytes; None where it is not known.

    Raises:
        WriteError: in place of an OSError of the system that names no file. One of a pipe or a connection is not about
            the file: it comes from what is told of the progress.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None or isinstance(error, ConnectionError):
            raise
        raise WriteError(path, error, nbytes) from error


class FileCalls:
    """The local file system, or one that is mounted. Every method raises OSError where the system does."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder and those above it; the new names are durable."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another rank was faster
                self.make_one_folder(folder)
            self.sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is no folder")

    def make_one_folder(self, path: Path) -> None:
        """Makes one folder."""
        path.mkdir()

    def create(self, path: Path, *, direct: bool = False) -> int:
        """Makes a file that must not exist, and returns its descriptor.

        Args:
            path: the file.
            direct: past the page cache, see `DIRECT_BYTES`.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`."""
        while data:
            try:
                count = os.pwrite(descriptor, data, offset)
            except OSError as error:
                # A file system that wants more than `DIRECT_BYTES`; or the disk is full, has taken a part that is no
                # multiple of it, and says what it is by the page cache alone.
                if error.errno == errno.EINVAL and leave_direct(descriptor):
                    continue
                raise
            data, offset = data[count:], offset + count

    def cut(self, descriptor: int, nbytes: int) -> None:
        """Sets a file's size."""
        os.ftruncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        """Makes what was written durable."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file another name, in place of what has that name."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Gives a file a second name, which must not exist; both are the file from now on."""
        os.link(old, new, follow_symlinks=False)

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""
        path.unlink(missing_ok=True)

    def close(self, descriptor: int) -> None:
        """Closes a file; the blocks of one that has no name any more are freed before this returns."""
        os.close(descriptor)

    def remove_folder(self, path: Path) -> None:
        """Removes a folder that is empty, and leaves one that is not."""
        with contextlib.suppress(OSError):
            path.rmdir()


class FreeingBeside(FileCalls):
    """Calls of a process that somebody waits for: blocks of removed files are freed in threads.

    A file system that tells the disk of each freed block (`discard`) took 0.16 s a GB for it.
    """

    def __init__(self) -> None:
        self._freeing: list[threading.Thread] = []

    def close(self, descriptor: int) -> None:
        """See `FileCalls`. Over NFS a removed file keeps a name while it is open, which would keep its folder too."""
        try:
            is_removed = not os.fstat(descriptor).st_nlink
        except OSError:  # over NFS, where another machine has removed it
            is_removed = False
        if not is_removed:
            os.close(descriptor)
            return
        thread = threading.Thread(target=os.close, args=(descriptor,), name="free blocks", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there may be no more threads
            os.close(descriptor)
            return
        self._freeing.append(thread)

    def wait_until_freed(self) -> None:
        """Returns when the blocks of all removed files are free."""
        while self._freeing:
            self._freeing.pop().join()


def leave_direct(descriptor: int) -> bool:
    """Lets a file that is read or written past the page cache go through it; False if it does already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def replace_file(calls: FileCalls, path: Path, data: bytes, *, mark: str) -> None:
    """Replaces `path` by `data` in one step: a reader sees the old bytes or the new ones; durable when it returns.

    Args:
        calls: the file system.
        path: the file.
        data: the whole new content.
        mark: suffix of the temporary name that the new file has before the rename; nobody else may use it.
    """
    unfinished = path.with_name(f".{path.name}.{mark}")
    # Locked until it has its name, see [Note: locked until the verdict] in posix.py.
    descriptor = create_locked(unfinished, calls.create)
    try:
        calls.write(descriptor, memoryview(data), 0)
        calls.sync(descriptor)
        calls.rename(unfinished, path)
    except BaseException:
        calls.remove(unfinished)
        raise
    finally:
        os.close(descriptor)
    calls.sync_folder(path.parent)


def create_locked(path: Path, create: Callable[[Path], int]) -> int:
    """Makes a file that nobody has removed by the time that it is locked, and returns its descriptor.

    Between the two steps, who cleans up may take it for one of a save that was killed, and lock and remove it. So its
    lock is waited for, and the file is made again if it has no name by then.

    Args:
        path: the file.
        create: function that makes it, which must not exist, and returns its descriptor.
    """
    while True:
        descriptor = create(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # no locks here: nobody removes what he cannot lock
            return descriptor
        if is_open_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def is_open_at(path: Path, descriptor: int) -> bool:
    """Whether a path is the name of an open file, and not of another one or of none."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:  # there is none, or, over NFS, another machine has removed the open one
        return False


def try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file, unless another process has it or the file system knows no locks.

    A process has it until it closes the file or ends, however it ends.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_locked_elsewhere(descriptor: int, *, shared: bool = False) -> bool | None:
    """Whether somebody else has the lock of an open file; it is taken where nobody has. None without locks.

    Args:
        descriptor: descriptor of the open file.
        shared: whether to try a shared lock, so that only an exclusive lock of somebody else counts; else any lock
            counts.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def free_bytes(path: Path) -> int:
    """Returns what an unprivileged user may still write in a folder's file system."""
    return shutil.disk_usage(path).free
