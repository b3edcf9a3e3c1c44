"""A folder of a file system as a place of checkpoints: past the page cache where that works, durable by fsync.

Names and order are the callers'; the file system's steps are `calls.py`'s.

[Note: locked until the verdict] A file stays open and locked until it is known whether an index names it. Who cleans a
tag up may remove files that no index names and nobody has locked: they are of a save that was killed. A new file may be
taken for one of these before it is locked, and is then made anew, see `create_locked`. So a name is removed only while
it is that of the file that was locked.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from dsrun.files.regular import NotRegularError, open_regular

from ..index.value import StoredFile
from .calls import DIRECT_BYTES, FileCalls, create_locked, leave_direct, naming, replace_file
from .places import Content, Entry, Place, ReadPattern

#: Bytes that are made durable at a time where the page cache has to be used: one flush of everything shows no progress.
SYNC_BYTES = 64 << 20
#: Blocks that are written at a time.
WRITERS = 2


@dataclass(slots=True)
class PosixWrittenFile:
    """A file that is on disk, and belongs to nobody yet; see [Note: locked until the verdict].

    Attributes:
        path: the file.
        stored: its size and checksums.
    """

    path: Path
    stored: StoredFile
    _calls: FileCalls
    _descriptor: int | None

    def release(self, *, remove: bool) -> None:
        """Lets go of the file.

        Args:
            remove: no index names it.
        """
        try:
            if remove:
                self._calls.remove(self.path)
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)


class PosixStorage:
    """See `Storage`; every place is a Path.

    Args:
        calls: the file system.
    """

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls

    def write(
        self, place: Place, content: Content, *, over: str | None, progress: Callable[[], None] = lambda: None
    ) -> PosixWrittenFile:
        """See `Storage`. Of a new file at most `WRITERS` blocks are taken before the first of them is written."""
        path = _path(place)
        with naming(path, content.nbytes):
            if over is None:
                return _write(path, content, calls=self._calls, progress=progress)
            data = b"".join(bytes(block[:count]) for block, count in content.blocks())
            replace_file(self._calls, path, data, mark=over)
        return PosixWrittenFile(path, StoredFile(len(data), None), self._calls, None)

    @contextmanager
    def read(self, place: Place, how: ReadPattern = ReadPattern.IN_ORDER) -> Generator[PosixOpenedFile]:
        """See `Storage`; no link is followed, and nothing but a regular file is opened."""
        flags = os.O_RDONLY | os.O_NOFOLLOW
        try:
            descriptor = open_regular(_path(place), flags | (os.O_DIRECT if how is ReadPattern.DIRECT else 0))
        except OSError as error:
            if how is not ReadPattern.DIRECT or error.errno != errno.EINVAL or isinstance(error, NotRegularError):
                raise
            descriptor = open_regular(_path(place), flags)
        if how is ReadPattern.BY_BLOCKS:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read that nobody asked for
        try:
            yield PosixOpenedFile(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def list(self, folder: Place) -> Sequence[Entry]:
        """See `Storage`; no link is followed."""
        found: list[Entry] = []
        with os.scandir(_path(folder)) as entries:
            for entry in entries:
                try:
                    stat, is_folder = entry.stat(follow_symlinks=False), entry.is_dir(follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile
                    continue
                found.append(
                    Entry(entry.name, 0 if is_folder else stat.st_size, stat.st_mtime, is_folder, stat.st_nlink)
                )
        return found

    def remove(self, places: Sequence[Place]) -> None:
        """See `Storage`; that they are gone is durable when this returns."""
        for place in places:
            self._calls.remove(_path(place))
        for folder in dict.fromkeys(_path(place).parent for place in places):
            with naming(folder):
                self._calls.sync_folder(folder)


@dataclass(frozen=True, slots=True)
class PosixOpenedFile:
    """See `OpenedFile`.

    Attributes:
        descriptor: descriptor of the open file.
        nbytes: its size.
    """

    descriptor: int
    nbytes: int

    def read_into(self, buffer: memoryview, first: int) -> int:
        """See `OpenedFile`; past the page cache `buffer` and `first` are multiples of `DIRECT_BYTES`."""
        while True:
            try:
                return os.preadv(self.descriptor, [buffer], first)
            except OSError as error:
                if error.errno != errno.EINVAL or not leave_direct(self.descriptor):
                    raise


def _path(place: Place) -> Path:
    assert isinstance(place, Path), f"{place} is no place in a file system"
    return place


def _write(path: Path, content: Content, *, calls: FileCalls, progress: Callable[[], None]) -> PosixWrittenFile:
    direct = True

    def create(path: Path) -> int:
        nonlocal direct
        descriptor, direct = _create(path, calls)
        return descriptor

    descriptor = create_locked(path, create)

    def write_block(data: memoryview, count: int, first: int) -> str:
        calls.write(descriptor, data[: -(-count // DIRECT_BYTES) * DIRECT_BYTES if direct else count], first)
        return xxh3_64_hexdigest(data[:count])

    sums: list[str] = []
    nbytes = 0
    try:
        with ThreadPoolExecutor(WRITERS) as pool:
            under_way: deque[Future[str]] = deque()
            for data, count in content.blocks():
                under_way.append(pool.submit(write_block, data, count, nbytes))
                nbytes += count
                if len(under_way) == WRITERS:
                    sums.append(under_way.popleft().result())
                    progress()
                if not direct and nbytes % SYNC_BYTES == 0:
                    calls.sync(descriptor)
            while under_way:
                sums.append(under_way.popleft().result())
                progress()
        if direct:
            calls.cut(descriptor, nbytes)
        calls.sync(descriptor)
        calls.sync_folder(path.parent)
    except BaseException:
        os.close(descriptor)
        calls.remove(path)
        raise
    return PosixWrittenFile(path, StoredFile(nbytes, tuple(sums)), calls, descriptor)


def _create(path: Path, calls: FileCalls) -> tuple[int, bool]:
    """Makes the file, past the page cache where the file system can."""
    try:
        return calls.create(path, direct=True), True
    except FileExistsError:
        raise
    except OSError:
        calls.remove(path)  # some file systems make it before they refuse
        return calls.create(path), False
